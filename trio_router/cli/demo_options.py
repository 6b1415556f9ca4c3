"""What `trio-router demo` can be told."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from ..config import COUNT, SWITCH, TEXT, Row, Section, Values, choice
from ..demo.pictures import find_picture
from ..demo.run import DemoSettings
from ..engine.settings import Connector
from ..rows import LOG_SECTION

PICTURE_PROMPT: Final = "What is in this picture?"

DEMO_SECTIONS: Final = (
    Section(
        name="demo",
        title="the chat",
        rows=(
            Row(
                name="prompt",
                kind=TEXT,
                default="Tell me a story about the old harbour.",
                help="what to ask (with --image, what is in it)",
            ),
            Row(
                name="image",
                kind=TEXT,
                metavars=("sample|FILE|URL",),
                help="send a picture, too, and tell what the workers saw: one made on the spot, a file, or one that"
                " they fetch by http or https",
            ),
            Row(
                name="mm_allow_private_media_hosts",
                kind=SWITCH,
                default=False,
                help="let that URL be on a host that is not public, such as this machine",
            ),
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
    """Make the record; reads the picture. Raises ConfigError for one that will not do."""
    given, private = values["image"], values["mm_allow_private_media_hosts"]
    asks_nothing = given is not None and values.source("prompt") == "default"
    return DemoSettings(
        prompt=PICTURE_PROMPT if asks_nothing else values["prompt"],
        image=None if given is None else find_picture(given, allow_private_hosts=private),
        allow_private_hosts=private,
        max_tokens=values["max_tokens"],
        connector=Connector(values["connector"]),
        once=values["once"],
        json=values["json"],
    )
