"""Getting the bytes that references name: over the web, out of a URL, or from a directory that may be read.

Whose fault a failure is decides what the client is told: BadRequest for its own, MediaUnavailable for what may pass.
It must not know what is in the bytes. No message quotes a reference.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol
from urllib.parse import SplitResult, unquote, unquote_to_bytes, urlsplit

import trio

from ...errors import BadRequest, RouterError
from ...offload import Offload
from ...rpc.transport import Dialer
from .references import Reference
from .settings import MediaSettings
from .web import MediaUnavailable, Web

_LONGEST_FILE_URL = 16_384
"""Longer than any path that may be opened, each of its bytes escaped."""


class Fetcher(Protocol):
    """Where bytes of media come from."""

    async def __call__(self, reference: Reference) -> bytes:
        """Raises BadRequest for what will never succeed, MediaUnavailable for what may."""


class MediaFetcher:
    """Fetches what the settings allow, each item within its time."""

    def __init__(self, settings: MediaSettings, *, dialer: Dialer, offload: Offload) -> None:
        """`offload` gets what blocks: files, and decoding base64."""
        self._settings = settings
        self._offload = offload
        self._web = Web(dialer=dialer, check=self._check_host, max_redirects=settings.max_redirects)

    async def __call__(self, reference: Reference) -> bytes:
        settings = self._settings
        timeout = settings.fetch_timeout(reference.kind)
        with trio.move_on_after(timeout):
            if reference.scheme == "data":
                data = await self._offload(lambda: decode_data_url(reference.url))
            elif reference.scheme == "file":
                data = await self._offload(lambda: self._read_file(reference.url))
            else:
                data = await self._web.get(reference.url, max_bytes=settings.max_item_bytes)
            if len(data) > settings.max_item_bytes:
                raise BadRequest(f"the item has more than {settings.max_item_bytes} bytes, which is the limit")
            return data
        raise MediaUnavailable(f"the item did not come within {timeout:g} s")

    def _check_host(self, target: SplitResult) -> None:
        domains = self._settings.allowed_domains
        if domains and target.hostname not in domains:
            raise BadRequest("the item, or what it redirects to, is on a host that is not in --allowed-media-domains")
        if target.scheme not in self._settings.schemes:
            raise BadRequest(f"the item redirects to a {target.scheme}: URL, which this worker does not accept")

    def _read_file(self, url: str) -> bytes:
        allowed = self._settings.allowed_local_path
        if len(url) > _LONGEST_FILE_URL:
            # Resolving takes time that grows with its square.
            raise BadRequest("the file cannot be read: its path is too long")
        try:
            parts = urlsplit(url)
            if allowed is None or parts.netloc not in ("", "localhost"):
                raise BadRequest("file: names no file of this machine that may be read")
            root, path = allowed.resolve(), Path(unquote(parts.path)).resolve()
            if not path.is_relative_to(root):
                raise BadRequest("the file is outside the directory that may be read (--allowed-local-media-path)")
            if path.exists() and not path.is_file():
                # Opening a pipe would wait for who writes into it, and keep a thread for as long.
                raise BadRequest("the file cannot be read: it is not a regular one")
            with path.open("rb") as file:
                return file.read(self._settings.max_item_bytes + 1)
        except (OSError, ValueError) as exc:
            raise BadRequest(f"the file cannot be read: {getattr(exc, 'strerror', None) or 'malformed path'}") from exc


def decode_data_url(url: str) -> bytes:
    """The bytes in a data: URL, which must be in base64, as vLLM's. Raises BadRequest."""
    head, comma, payload = url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise BadRequest("only base64 data: URLs are supported")
    try:
        raw = unquote_to_bytes(payload) if "%" in payload else payload.encode("ascii")
        return base64.b64decode(raw, validate=True)
    except (binascii.Error, UnicodeEncodeError) as exc:
        raise BadRequest("a data: URL's content is not base64") from exc


async def fetch_all(references: Sequence[Reference], *, fetcher: Fetcher) -> list[bytes]:
    """Everything at once, in order. The first failure ends the rest, and is raised with the number of its item."""
    items: list[bytes] = [b""] * len(references)
    failures: list[RouterError] = []

    async def one(index: int, nursery: trio.Nursery) -> None:
        try:
            items[index] = await fetcher(references[index])
        except (BadRequest, MediaUnavailable) as exc:
            failures.append(type(exc)(f"media_refs[{index}]: {exc.message}", code=exc.error_code))
            nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        for index in range(len(references)):
            nursery.start_soon(one, index, nursery)
    if failures:
        raise failures[0]
    return items
