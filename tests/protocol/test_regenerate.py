"""The generated packages are what the .proto files say, and messages.py passes all of them on."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import betterproto
import pytest
from betterproto.grpc.grpclib_server import ServiceBase

from trio_router.protocol import messages

ROOT = Path(__file__).resolve().parents[2]
PROTOCOL = ROOT / "trio_router" / "protocol"
PACKAGES = ("grpc", "smg", "trio_router", "vllm")


@pytest.fixture(scope="module")
def regenerated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    into = tmp_path_factory.mktemp("regenerated")
    command = [sys.executable, str(ROOT / "protos" / "regenerate.py"), "--into", str(into)]
    finished = subprocess.run(command, check=False, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    return into


def modules_below(folder: Path) -> dict[str, str]:
    # The syntax tree, not the text: layout is the formatter's, and that is not pinned.
    return {
        str(path.relative_to(folder)): ast.dump(ast.parse(path.read_text()))
        for package in PACKAGES
        for path in (folder / package).rglob("*.py")
    }


def test_the_checked_in_classes_are_current(regenerated: Path) -> None:
    checked_in, fresh = modules_below(PROTOCOL), modules_below(regenerated)
    assert checked_in.keys() == fresh.keys()
    stale = [name for name, tree in fresh.items() if checked_in[name] != tree]
    assert not stale, "run: python protos/regenerate.py"


def test_regenerating_writes_only_the_generated_packages(regenerated: Path) -> None:
    assert sorted(path.name for path in regenerated.iterdir()) == sorted(PACKAGES)


def test_messages_passes_on_every_class_under_one_name() -> None:
    exported = {getattr(messages, name) for name in messages.__all__}
    defined = set()
    for package in ("vllm.grpc.engine", "smg.grpc.common", "grpc.health.v1", "trio_router.worker.v1"):
        module = sys.modules[f"trio_router.protocol.{package}"]
        kinds = (betterproto.Message, betterproto.Enum, betterproto.ServiceStub, ServiceBase)
        defined |= {
            cls
            for _, cls in inspect.getmembers(module, inspect.isclass)
            if issubclass(cls, kinds) and cls.__module__ == module.__name__
        }
    assert exported == defined
    assert len(messages.__all__) == len(exported)


def test_the_routes_are_those_of_the_wire() -> None:
    engine = messages.VllmEngineBase().__mapping__()
    assert {route.rpartition("/")[2] for route in engine} == {
        "Generate", "Embed", "HealthCheck", "FlushCache", "StartProfile", "StopProfile", "Abort", "GetModelInfo",
        "GetServerInfo", "GetLoads", "GetTokenizer", "SubscribeKvEvents",
    }  # fmt: skip
    assert all(route.startswith("/vllm.grpc.engine.VllmEngine/") for route in engine)
    assert "/grpc.health.v1.Health/Check" in messages.HealthBase().__mapping__()
    assert "/trio_router.worker.v1.ReferenceWorker/GetCounters" in messages.ReferenceWorkerBase().__mapping__()
