"""Writes trio_router/protocol's generated packages anew from the .proto files beside this script.

It replaces those packages as a whole, so a message that left the .proto files leaves the code too. It touches
nothing else in trio_router/protocol.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import sysconfig
import tempfile
from pathlib import Path

from grpc_tools import protoc  # type: ignore[import-untyped]  # grpcio-tools ships no types

PROTOS = Path(__file__).resolve().parent
PROTOCOL_PACKAGE = PROTOS.parent / "trio_router" / "protocol"
PLUGIN = "protoc-gen-python_betterproto"


def regenerate(into: Path) -> list[Path]:
    """Generates every package below the directory `into` and returns their top folders. Raises SystemExit."""
    plugin = shutil.which(PLUGIN, path=sysconfig.get_path("scripts")) or shutil.which(PLUGIN)
    if plugin is None:
        raise SystemExit(f"{PLUGIN} is not installed: pip install 'trio-router[test]'")
    sources = sorted(path.name for path in PROTOS.glob("*.proto"))
    with tempfile.TemporaryDirectory() as scratch:
        arguments = [
            "protoc",
            f"--proto_path={PROTOS}",
            f"--plugin={PLUGIN}={plugin}",
            f"--python_betterproto_out={scratch}",
            *sources,
        ]
        if protoc.main(arguments) != 0:
            raise SystemExit("protoc failed; its message is above")
        # The plugin also writes an __init__.py at the top, which is not ours to place: `into` has one of its own.
        packages = sorted(path for path in Path(scratch).iterdir() if path.is_dir())
        for package in packages:
            target = into / package.name
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(package, target)
    return [into / package.name for package in packages]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--into", type=Path, default=PROTOCOL_PACKAGE, help="directory to write the packages to")
    for package in regenerate(parser.parse_args().into):
        sys.stdout.write(f"{package}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
