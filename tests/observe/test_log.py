"""Logs: one line for each request, one form for everything, nothing of what clients wrote."""

from __future__ import annotations

import io
import json
import logging

import pytest

from trio_router.observe.hooks import Outcome, RequestRecord
from trio_router.observe.log import LogSettings, RequestLog, request_fields, set_up_logging

RECORD = RequestRecord(
    request_id="chatcmpl-1",
    outcome=Outcome.OK,
    attempts=2,
    prefill_worker="p:1",
    decode_worker="d:1",
    received_at=10.0,
    prefill_started_at=10.001,
    prefill_ended_at=10.101,
    decode_started_at=10.102,
    first_frame_at=10.121,
    ended_at=11.0,
    finish_reason="stop",
    prompt_tokens=18,
    cached_tokens=16,
    output_tokens=48,
    client="http",
    workers_tried=("p:2",),
)
NEVER_STARTED = RequestRecord(
    request_id="x", outcome=Outcome.FAILED, error_code="no_available_workers", received_at=1.0, ended_at=1.0
)


@pytest.fixture
def stream():
    root = logging.getLogger()
    before = list(root.handlers), root.level
    yield io.StringIO()
    root.handlers[:], level = before
    root.setLevel(level)
    logging.getLogger("trio_router").setLevel(logging.NOTSET)


class TestFields:
    def test_durations_are_milliseconds_between_the_points_they_name(self):
        fields = request_fields(RECORD)
        spans = {name: value for name, value in fields.items() if name.endswith("_ms")}
        assert spans == {
            "queue_ms": 1.0,
            "prefill_ms": 100.0,
            "handoff_ms": 20.0,
            "ttft_ms": 121.0,
            "total_ms": 1000.0,
        }

    def test_workers_outcome_and_counts_are_there(self):
        fields = request_fields(RECORD)
        assert fields["outcome"] == "ok"
        assert (fields["prefill"], fields["decode"], fields["failed_on"]) == ("p:1", "d:1", ["p:2"])
        assert (fields["prompt_tokens"], fields["cached_tokens"], fields["output_tokens"]) == (18, 16, 48)

    def test_what_was_never_reached_is_left_out(self):
        assert set(request_fields(NEVER_STARTED)) == {
            "request_id",
            "outcome",
            "code",
            "client",
            "attempts",
            "prompt_tokens",
            "cached_tokens",
            "output_tokens",
            "total_ms",
        }

    def test_an_id_can_forge_no_line_and_fill_no_page(self):
        evil = RequestRecord(request_id="a\nb\x1b[31m" + "c" * 1000, outcome=Outcome.OK, received_at=0.0, ended_at=0.0)
        shown = request_fields(evil)["request_id"]
        assert shown.startswith("a?b?[31mccc")
        assert len(shown) == 128


class TestLines:
    def test_an_ended_request_is_exactly_one_line(self, stream):
        set_up_logging(LogSettings(json=True), stream=stream)
        RequestLog().request_ended(RECORD)
        [line] = stream.getvalue().splitlines()
        entry = json.loads(line)
        assert entry["event"] == "request"
        assert entry["level"] == "info"
        assert request_fields(RECORD).items() <= entry.items()

    def test_a_refused_request_is_exactly_one_line_and_no_warning(self, stream):
        set_up_logging(LogSettings(json=True), stream=stream)
        RequestLog().request_refused(request_id="req-1\n", client="chat", code="malformed_json")
        [line] = stream.getvalue().splitlines()
        entry = json.loads(line)
        assert {name: entry[name] for name in ("event", "level", "request_id", "outcome", "code", "client")} == {
            "event": "request",
            "level": "info",
            "request_id": "req-1?",
            "outcome": "refused",
            "code": "malformed_json",
            "client": "chat",
        }

    @pytest.mark.parametrize(
        ("outcome", "level"),
        [
            (Outcome.OK, "info"),
            (Outcome.CLIENT_LEFT, "info"),
            (Outcome.ABORTED, "info"),
            (Outcome.FAILED, "warning"),
            (Outcome.TIMEOUT, "warning"),
        ],
    )
    def test_what_a_client_decided_is_no_warning_and_what_failed_is(self, stream, outcome, level):
        set_up_logging(LogSettings(json=True), stream=stream)
        RequestLog().request_ended(RequestRecord(request_id="x", outcome=outcome, received_at=0.0, ended_at=0.0))
        assert json.loads(stream.getvalue())["level"] == level

    def test_a_worker_that_goes_is_a_warning(self, stream):
        set_up_logging(LogSettings(json=True), stream=stream)
        RequestLog().worker_ready(worker="d:1", role="decode", ready=True)
        RequestLog().worker_ready(worker="d:1", role="decode", ready=False)
        entries = [json.loads(line) for line in stream.getvalue().splitlines()]
        assert [(entry["event"], entry["level"]) for entry in entries] == [
            ("worker ready", "info"),
            ("worker not ready", "warning"),
        ]

    def test_who_processes_media_is_told_once_for_each_change_and_model(self, stream):
        set_up_logging(LogSettings(json=True), stream=stream)
        log = RequestLog()
        for model, mode, reason in [
            ("m", "worker", "auto_uniform"),
            ("m", "worker", "auto_uniform"),
            ("other", "worker", "auto_uniform"),
            ("m", "router", "auto_mixed"),
            ("m", "worker", "auto_uniform"),
        ]:
            log.media_resolved(model=model, mode=mode, reason=reason)
        entries = [json.loads(line) for line in stream.getvalue().splitlines()]
        assert [(entry["model"], entry["side"], entry["reason"]) for entry in entries] == [
            ("m", "worker", "auto_uniform"),
            ("other", "worker", "auto_uniform"),
            ("m", "router", "auto_mixed"),
            ("m", "worker", "auto_uniform"),
        ]

    def test_connections_are_told_of_to_who_looks_closely(self, stream):
        set_up_logging(LogSettings(json=True, level="debug"), stream=stream)
        RequestLog().channel_changed(worker="d:1", state="backoff", reason="refused")
        RequestLog().channel_changed(worker="d:1", state="ready", reason=None)
        entries = [json.loads(line) for line in stream.getvalue().splitlines()]
        assert [(entry["level"], entry["worker"], entry["state"], entry.get("reason")) for entry in entries] == [
            ("debug", "d:1", "backoff", "refused"),
            ("debug", "d:1", "ready", None),
        ]

    def test_the_level_holds_for_requests_and_for_what_modules_log(self, stream):
        set_up_logging(LogSettings(json=True, level="warning"), stream=stream)
        RequestLog().request_ended(RECORD)
        logging.getLogger("trio_router.dispatch").info("quiet")
        assert stream.getvalue() == ""
        logging.getLogger("trio_router.dispatch").warning("loud %d", 1)
        assert json.loads(stream.getvalue())["event"] == "loud 1"

    def test_debugging_is_about_us_and_not_about_libraries_which_write_headers_with_keys_in_them(self, stream):
        set_up_logging(LogSettings(json=True, level="debug"), stream=stream)
        logging.getLogger("hpack.hpack").debug("Adding b'authorization'=b'Bearer key' to the header table")
        assert stream.getvalue() == ""
        logging.getLogger("trio_router.dispatch").debug("ours")
        logging.getLogger("hpack.hpack").info("theirs")
        assert [json.loads(line)["event"] for line in stream.getvalue().splitlines()] == ["ours", "theirs"]

    def test_a_module_s_exception_is_one_json_line(self, stream):
        set_up_logging(LogSettings(json=True), stream=stream)
        try:
            raise ValueError("broken")
        except ValueError:
            logging.getLogger("trio_router.rpc").exception("handler failed")
        [line] = stream.getvalue().splitlines()
        assert json.loads(line)["exception"][0]["exc_value"] == "broken"

    @pytest.mark.parametrize("as_json", [True, False], ids=["json", "text"])
    def test_a_traceback_says_where_it_broke_and_nothing_that_a_client_wrote(self, stream, as_json):
        """The frames of a broken handler hold prompts and answers in their variables."""

        def handle(prompt: str) -> None:
            raise ValueError("broken")

        set_up_logging(LogSettings(json=as_json), stream=stream)
        try:
            handle("my secret " + "prompt")
        except ValueError:
            logging.getLogger("trio_router.front").exception("handler failed")
        assert "broken" in stream.getvalue()
        assert "in handle" in stream.getvalue() or '"handle"' in stream.getvalue()
        assert "my secret prompt" not in stream.getvalue()

    def test_without_set_up_entries_go_to_the_logging_of_the_process(self, caplog):
        with caplog.at_level("INFO", logger="trio_router.requests"):
            RequestLog().request_ended(RECORD)
        [entry] = caplog.records
        assert (entry.name, entry.levelname) == ("trio_router.requests", "INFO")

    def test_text_is_for_people_and_without_colours_in_a_file(self, stream):
        set_up_logging(LogSettings(), stream=stream)
        RequestLog().request_ended(RECORD)
        [line] = stream.getvalue().splitlines()
        assert "\x1b" not in line
        assert "outcome=ok" in line
        assert "ttft_ms=121.0" in line
