"""What `trio-router demo` can be told."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from ..config import COUNT, SWITCH, TEXT, Row, Section, Values, choice
from ..demo.run import DemoSettings
from ..engine.settings import Connector
from ..rows import LOG_SECTION

DEMO_SECTIONS: Final = (
    Section(
        name="demo",
        title="the chat",
        rows=(
            Row(name="prompt", kind=TEXT, default="Tell me a story about the old harbour.", help="what to ask"),
            Row(name="max_tokens", kind=COUNT, default=48, help="longest answer"),
            Row(
                name="connector",
                kind=choice(*(connector.value for connector in Connector if connector.moves_state)),
                default=Connector.NIXL.value,
                help="how state gets to decode workers: they pull it (nixl), or prefill workers push it (mooncake)",
            ),
            Row(
                name="once", kind=SWITCH, default=False, help="exit after the chat: 0 if all went as it should, else 1"
            ),
            Row(name="json", kind=SWITCH, default=False, help="print one JSON object instead of text"),
        ),
    ),
    # Its own requests would write a line each into the picture.
    replace(
        LOG_SECTION,
        rows=tuple(replace(row, default="warning") if row.name == "log_level" else row for row in LOG_SECTION.rows),
    ),
)


def demo_settings(values: Values) -> DemoSettings:
    """Make the record."""
    return DemoSettings(
        prompt=values["prompt"],
        max_tokens=values["max_tokens"],
        connector=Connector(values["connector"]),
        once=values["once"],
        json=values["json"],
    )
