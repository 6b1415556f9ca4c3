"""Tokenizer files as one archive: how a worker packs them and how a router takes them apart without trusting it.

A bundle is a flat ZIP whose SHA-256 travels beside it (GetTokenizer). This module knows names, sizes and hashes; it
must not know what is in the files, nor how the archive travels. Nothing is ever written to disk.
"""

from __future__ import annotations

import hashlib
import io
import re
import struct
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
from grpclib.const import Status

from trio_router.errors import RouterError

# The limits that routers in the field put on a worker's archive; ours refuse and accept the same ones.
MAX_PACKED_BYTES = 200 * 1024 * 1024
MAX_ENTRIES = 50
MAX_UNPACKED_BYTES = 500 * 1024 * 1024

# What vLLM's servicer 0.14.1 sends, in its order; then whatever else matches the patterns.
MEMBER_NAMES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "tiktoken.model",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
MEMBER_PATTERNS = ("*.tiktoken", "*.jinja", "*.model")

_READ_BYTES = 1024 * 1024
_SHA256 = re.compile(r"[0-9a-f]{64}")
# The end-of-central-directory record (APPNOTE 4.3.16) and the locator that announces its 64-bit form (4.3.15).
_END_RECORD = struct.Struct("<4s4H2LH")
_END_SIGNATURE = b"PK\x05\x06"
_END64_LOCATOR_SIGNATURE = b"PK\x06\x07"
_END64_LOCATOR_BYTES = 20
_MAX_COMMENT_BYTES = 0xFFFF
# 50 entries with names and extra fields far longer than any tokenizer file's.
_MAX_DIRECTORY_BYTES = MAX_ENTRIES * 1024


class BadBundle(RouterError):
    """A set of tokenizer files cannot be used; the message names the file or the limit."""

    grpc_status = Status.UNAVAILABLE
    http_status = 503
    code = "tokenizer_load_failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFiles:
    """The files of one tokenizer by flat name, in memory."""

    contents: Mapping[str, bytes]

    def json_object(self, name: str) -> dict[str, object]:
        """Read a JSON object; a file that is not there is an empty one. Raises BadBundle for any other content."""
        content = self.contents.get(name)
        if content is None:
            return {}
        try:
            return msgspec.json.decode(content, type=dict[str, object])
        except (msgspec.DecodeError, RecursionError) as error:
            raise BadBundle(f"{name} is not a JSON object: {error}") from error

    def text(self, name: str) -> str | None:
        """Read a text file; None when it is not there. Raises BadBundle when it is not UTF-8."""
        content = self.contents.get(name)
        try:
            return None if content is None else content.decode()
        except UnicodeDecodeError as error:
            raise BadBundle(f"{name} is not UTF-8: {error}") from error


def unpack(archive: bytes, *, sha256: str) -> TokenizerFiles:
    """Check and unpack a worker's archive.

    `sha256` is the lower-case hex digest that came with the last chunk. Sizes are those of the data as it comes out of
    the decompressor, whatever its headers say. Raises BadBundle, naming the limit or the entry.
    """
    if len(archive) > MAX_PACKED_BYTES:
        raise BadBundle(f"the archive has {len(archive)} bytes, the limit is {MAX_PACKED_BYTES}")
    _check_hash(archive, sha256=sha256)
    _check_directory_size(archive)
    contents: dict[str, bytes] = {}
    room = MAX_UNPACKED_BYTES
    try:
        with zipfile.ZipFile(io.BytesIO(archive)) as opened:
            entries = opened.infolist()
            if len(entries) > MAX_ENTRIES:
                raise BadBundle(f"the archive has {len(entries)} entries, the limit is {MAX_ENTRIES}")
            for entry in entries:
                _check_entry(entry, taken=contents)
                content = _read_entry(opened, entry, room=room)
                room -= len(content)
                contents[entry.filename] = content
    # What zipfile and zlib raise for a malformed archive, per their documentation and fuzzing of this function.
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, OSError, ValueError, struct.error) as error:
        raise BadBundle(f"the archive cannot be read: {error}") from error
    if not contents:
        raise BadBundle("the archive has no files")
    return TokenizerFiles(contents=contents)


def _check_hash(archive: bytes, *, sha256: str) -> None:
    if not _SHA256.fullmatch(sha256):
        raise BadBundle(f"the archive's SHA-256 must be 64 lower-case hex digits, not {sha256[:80]!r}")
    actual = hashlib.sha256(archive).hexdigest()
    if actual != sha256:
        raise BadBundle(f"the archive's SHA-256 is {actual}, its sender says {sha256}")


def _check_directory_size(archive: bytes) -> None:
    """Refuse a central directory too large for the entry limit, before zipfile makes an object of each entry."""
    tail_start = max(0, len(archive) - _END_RECORD.size - _MAX_COMMENT_BYTES)
    position = archive.rfind(_END_SIGNATURE, tail_start)
    if position < 0 or position + _END_RECORD.size > len(archive):
        raise BadBundle("the archive is not a ZIP file")
    locator = max(0, position - _END64_LOCATOR_BYTES)
    if archive.startswith(_END64_LOCATOR_SIGNATURE, locator):
        raise BadBundle("the archive uses ZIP64, which nothing within its size limit needs")
    directory_bytes = _END_RECORD.unpack_from(archive, position)[5]
    if directory_bytes > _MAX_DIRECTORY_BYTES:
        raise BadBundle(
            f"the archive's directory has {directory_bytes} bytes, the limit is {_MAX_DIRECTORY_BYTES} "
            f"({MAX_ENTRIES} entries)"
        )


def _check_entry(entry: zipfile.ZipInfo, *, taken: Mapping[str, bytes]) -> None:
    # The name as written: zipfile shows `filename` cut at a NUL and with the platform's separators replaced.
    name = entry.orig_filename
    if not _is_flat(name):
        raise BadBundle(f"the archive's entry {name[:80]!r} is not a plain file name")
    if name in taken:
        raise BadBundle(f"the archive has two entries named {name!r}")
    if entry.flag_bits & 0x1:
        raise BadBundle(f"the archive's entry {name!r} is encrypted")
    if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise BadBundle(f"the archive's entry {name!r} is neither stored nor deflated")


def _is_flat(name: str) -> bool:
    return name.isprintable() and name not in ("", ".", "..") and not any(mark in name for mark in "/\\:")


def _read_entry(opened: zipfile.ZipFile, entry: zipfile.ZipInfo, *, room: int) -> bytes:
    pieces: list[bytes] = []
    with opened.open(entry) as stream:
        while piece := stream.read(_READ_BYTES):
            room -= len(piece)
            if room < 0:
                raise BadBundle(f"the archive unpacks to more than {MAX_UNPACKED_BYTES} bytes, which is the limit")
            pieces.append(piece)
    return b"".join(pieces)


def read_directory(directory: Path) -> TokenizerFiles:
    """Read a model directory's tokenizer files, in the order of an archive. Raises BadBundle when it has none."""
    names = [name for name in MEMBER_NAMES if (directory / name).is_file()]
    for pattern in MEMBER_PATTERNS:
        # Sorted, so that the archive of a directory is the same on every file system.
        names += sorted(path.name for path in directory.glob(pattern) if path.is_file() and path.name not in names)
    if not names:
        raise BadBundle(f"No tokenizer files found in {directory}")
    try:
        return TokenizerFiles(contents={name: (directory / name).read_bytes() for name in names})
    except OSError as error:
        raise BadBundle(f"the tokenizer files in {directory} cannot be read: {error}") from error


def pack(directory: Path) -> bytes:
    """Pack a model directory's tokenizer files; equal files make equal bytes. Raises BadBundle when it has none."""
    return pack_files(read_directory(directory))


def pack_files(files: TokenizerFiles) -> bytes:
    """Pack tokenizer files, in the order they stand in; equal files make equal bytes."""
    output = io.BytesIO()
    with zipfile.ZipFile(output, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as archive:
        for name, content in files.contents.items():
            archive.writestr(_entry(name), content)
    return output.getvalue()


def _entry(name: str) -> zipfile.ZipInfo:
    # The format's earliest date, a plain file's mode and one platform: nothing of the machine enters the archive.
    entry = zipfile.ZipInfo(name, date_time=(1980, 1, 1, 0, 0, 0))
    entry.compress_type = zipfile.ZIP_DEFLATED
    entry.external_attr = 0o644 << 16
    entry.create_system = 3
    return entry
