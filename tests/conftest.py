"""What holds for every test, and certificates for those that speak TLS: each session makes its own authorities."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import trustme
from hypothesis import settings

# How long an example takes says nothing of the code on a machine that does other things, too: timings are benchmarks.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


class Pair(NamedTuple):
    """A certificate and its key, as the settings of both sides take them: `ClientTls(**pair._asdict())`."""

    cert_file: Path
    key_file: Path


class Authority:
    """Signs certificates and writes them to files in `directory`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._ca = trustme.CA()
        self._issued = 0
        self.ca_file = directory / "ca.pem"
        self._ca.cert_pem.write_to_path(self.ca_file)

    def issue(self, *names: str, since: int = 2020, until: int = 2100, **options: Any) -> Pair:
        """A certificate for these names or addresses, valid in these years."""
        issued = self._ca.issue_cert(
            *names, not_before=datetime(since, 1, 1), not_after=datetime(until, 1, 1), **options
        )
        self._issued += 1
        pair = Pair(self._directory / f"{self._issued}.pem", self._directory / f"{self._issued}.key")
        issued.private_key_pem.write_to_path(pair.key_file)
        for part in issued.cert_chain_pems:
            part.write_to_path(pair.cert_file, append=True)
        return pair


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Whom everybody trusts."""
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="session")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Whom nobody trusts, unless a test says so."""
    return Authority(tmp_path_factory.mktemp("stranger"))


@pytest.fixture(scope="session")
def server_pair(authority: Authority) -> Pair:
    """What servers usually show: good for the hosts that tests dial."""
    return authority.issue("server.test", "localhost", "127.0.0.1", "memory")


@pytest.fixture(scope="session")
def client_pair(authority: Authority) -> Pair:
    """What clients show where they are asked to."""
    return authority.issue("client.test")
