"""A worker's URL, its slots, and whom it has met."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_router.errors import ConfigError
from trio_router.fleet.worker import Lease, Worker, WorkerRole, WorkerSpec


def make_worker(url: str = "grpc://host:1") -> Worker:
    return Worker(WorkerSpec(url=url, role=WorkerRole.DECODE), client=None)


class TestSpec:
    @pytest.mark.parametrize(
        ("url", "address"),
        [
            ("grpc://10.0.0.1:50051", "10.0.0.1:50051"),
            ("grpc://worker.example:1/", "worker.example:1"),
            ("grpc://[::1]:65535", "[::1]:65535"),
            ("GRPC://Worker:7", "worker:7"),
            ("grpcs://worker:7", "worker:7"),
            ("unix:/run/Worker.sock", "unix:/run/Worker.sock"),
            ("unix:///run/worker", "unix:/run/worker"),
            ("grpc+unix:/run/worker", "unix:/run/worker"),
            ("unix:here", "unix:here"),
        ],
    )
    def test_an_address_is_what_is_dialed(self, url, address):
        assert WorkerSpec(url=url, role=WorkerRole.PLAIN).address == address

    @pytest.mark.parametrize(
        "url",
        [
            "",
            "127.0.0.1:1",
            "http://x:1",
            "grpc://x",
            "grpc://x:y",
            "grpc://x:70000",
            "grpc://x:0",
            "grpc://:1",
            "grpc://x:1/path",
            "grpc://x:1?tls=no",
            "grpc://x:1#there",
            "grpc://me:secret@x:1",
            "grpc://[::1:5",
            "grpcs://x",
            "unix:",
            "unix://",
            "unix://x/path",
            "unix:/path?query",
            "grpcs+unix:/path",
        ],
    )
    def test_what_is_no_worker_url_is_refused_where_it_is_written(self, url):
        with pytest.raises(ConfigError, match="worker URL"):
            WorkerSpec(url=url, role=WorkerRole.PLAIN)

    @pytest.mark.parametrize(
        ("url", "tls"), [("grpcs://x:1", True), ("GRPCS://x:1", True), ("grpc://x:1", False), ("unix:/x", False)]
    )
    def test_only_grpcs_asks_for_tls(self, url, tls):
        assert WorkerSpec(url=url, role=WorkerRole.PLAIN).tls is tls

    def test_a_password_in_a_url_is_not_repeated(self):
        with pytest.raises(ConfigError) as caught:
            WorkerSpec(url="grpc://me:secret@x:1", role=WorkerRole.PLAIN)
        assert "secret" not in caught.value.message

    def test_who_misspells_a_rank_is_told_how_one_is_written(self):
        with pytest.raises(ConfigError, match=r"^worker URL grpc://…@first: .* rank is grpc://host:port@N$"):
            WorkerSpec(url="grpc://x:1@first", role=WorkerRole.PLAIN)


class TestLease:
    def test_i8_a_slot_is_returned_once(self):
        worker = make_worker()
        first, second = Lease(worker), Lease(worker)
        assert worker.in_flight == 2
        first.release()
        first.release()
        assert worker.in_flight == 1
        second.release()
        assert worker.in_flight == 0

    @given(st.lists(st.integers(0, 5)))
    def test_i8_slots_in_use_are_the_leases_that_are_held(self, releases):
        worker = make_worker()
        leases = [Lease(worker) for _ in range(6)]
        for index in releases:
            leases[index].release()
        assert worker.in_flight == 6 - len(set(releases))

    @given(st.lists(st.tuples(st.integers(0, 5), st.booleans())))
    def test_i8_a_try_ends_once_when_it_goes_well_or_with_its_slot(self, steps):
        worker = make_worker()
        leases = [Lease(worker, tries=number < 3) for number in range(6)]
        for index, goes_well in steps:
            (leases[index].settle if goes_well else leases[index].release)()
        assert worker.trying == 3 - len({index for index, _ in steps if index < 3})


class TestMeeting:
    def test_who_has_pulled_has_met_that_engine_of_that_worker(self):
        worker = make_worker()
        assert not worker.has_met("p:1", engine_id="one")
        worker.note_pull("p:1", engine_id="one")
        assert worker.has_met("p:1", engine_id="one")
        assert not worker.has_met("p:2", engine_id="one")

    def test_a_prefill_worker_that_was_restarted_is_a_stranger(self):
        worker = make_worker()
        worker.note_pull("p:1", engine_id="one")
        assert not worker.has_met("p:1", engine_id="two")
        worker.note_pull("p:1", engine_id="two")
        assert not worker.has_met("p:1", engine_id="one"), "one entry for each worker, however often it restarts"

    def test_one_or_all_can_be_forgotten(self):
        worker = make_worker()
        for name in ("p:1", "p:2"):
            worker.note_pull(name, engine_id="e")
        worker.forget("p:1")
        worker.forget("never met")
        assert [worker.has_met(name, engine_id="e") for name in ("p:1", "p:2")] == [False, True]
        worker.forget()
        assert not worker.has_met("p:2", engine_id="e")


def test_a_warning_is_worth_one_line_a_worker():
    one, other = make_worker(), make_worker("grpc://other:1")
    assert [one.first_time("x"), one.first_time("x"), one.first_time("y"), other.first_time("x")] == [
        True,
        False,
        True,
        True,
    ]


def test_a_worker_says_in_a_line_what_it_is():
    worker = make_worker()
    lease = Lease(worker)
    assert repr(worker) == "<Worker decode host:1 not ready, 1 in flight>"
    lease.release()
    assert repr(lease) == "<Lease on host:1 released>"
