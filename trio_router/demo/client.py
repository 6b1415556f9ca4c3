"""The smallest client that can read a chat stream: one POST over h11, server-sent events out. Not for general use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import h11
import msgspec

from ..errors import LinkError, RouterError
from ..rpc.transport import Dialer, Transport

_READ_BYTES: Final = 65536
_DONE: Final = b"[DONE]"


class ChatFailed(RouterError):
    """The router did not answer the demo's own request well; the message says what came instead."""

    code = "demo_failed"


async def stream_chat(
    address: str, request: dict[str, Any], *, dialer: Dialer, on_event: Callable[[Any], None]
) -> None:
    """Send a streaming chat request and hand every event, decoded, to `on_event` as it comes.

    Returns at the end of the stream. Raises ChatFailed for an error status, an error event or a stream without its end
    mark, LinkError when the connection breaks. Who calls owns the deadline.
    """
    transport = await dialer(address)
    try:
        connection = h11.Connection(our_role=h11.CLIENT)
        body = msgspec.json.encode(request)
        headers = [("host", address), ("content-type", "application/json"), ("content-length", str(len(body)))]
        head = h11.Request(method="POST", target="/v1/chat/completions", headers=headers)
        await _send(transport, connection.send(head) + connection.send(h11.Data(body)))
        connection.send(h11.EndOfMessage())
        await _read_events(transport, connection, on_event=on_event)
    except h11.RemoteProtocolError as exc:
        raise ChatFailed(f"the router's answer is not HTTP: {exc}") from exc
    finally:
        transport.close()


async def _send(transport: Transport, data: bytes) -> None:
    sent, view = 0, memoryview(data)  # a picture's rest must not be copied for every write
    while sent < len(data):
        count = transport.send_nowait(view[sent:])
        if not count:
            await transport.wait_writable()
        sent += count


async def _read_events(transport: Transport, connection: h11.Connection, *, on_event: Callable[[Any], None]) -> None:
    status, text = 0, b""
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            connection.receive_data(await _receive(transport))
        elif isinstance(event, h11.Response):
            status = event.status_code
        elif isinstance(event, h11.Data):
            text += bytes(event.data)
            if status == 200:
                *whole, text = text.split(b"\n\n")
                if _feed(whole, on_event=on_event):
                    return
        elif isinstance(event, h11.EndOfMessage):
            raise ChatFailed(f"HTTP {status}: {text.decode(errors='replace') or 'the stream ended early'}")


async def _receive(transport: Transport) -> bytes:
    while (data := transport.recv_nowait(_READ_BYTES)) is None:
        await transport.wait_readable()
    if not data:
        raise LinkError("the router closed the connection in the middle of its answer")
    return data


def _feed(events: list[bytes], *, on_event: Callable[[Any], None]) -> bool:
    """Whether the stream has come to its end mark."""
    for event in events:
        data = event.removeprefix(b"data: ")
        if data == _DONE:
            return True
        if data is event:
            continue  # a comment: the router keeping the connection alive
        message = msgspec.json.decode(data)
        if "error" in message:
            raise ChatFailed(f"the stream failed: {message['error'].get('message')}")
        on_event(message)
    return False
