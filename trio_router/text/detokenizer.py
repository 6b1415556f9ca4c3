"""Token ids of one stream to text, as they come: only text that no later token can change.

Two ways with one contract. Byte-level BPE vocabularies (by far the most) have a fixed byte string per token, so a table
and incremental UTF-8 do (`bench/detokenize.py`); any other decoder goes through the tokenizers library's own stream.
This module must not know stop strings, logprobs or how the text is sent.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Mapping
from typing import Protocol

import msgspec
from tokenizers import Tokenizer as HfTokenizer
from tokenizers.decoders import DecodeStream


class Detokenizer(Protocol):
    """Turns one stream's token ids into text; cheap to make, and good for one stream only.

    All `step` results and `flush` together equal the tokenizer's `decode` of all the ids. One exception: where the
    library's decoder itself lets a token change text before it (byte fallback does, when a broken character follows
    byte tokens of whole ones), what has been returned stands.
    """

    def step(self, token_ids: list[int]) -> str:
        """Take the next ids; returns the text that is now certain, "" if none is."""
        ...

    def flush(self) -> str:
        """End the stream: returns what was withheld, with U+FFFD for bytes that never became a character."""
        ...

    def json_piece(self, token_id: int) -> bytes | None:
        """The text that `step([token_id])` would return, as a JSON string with its quotes, if that is known beforehand.

        A result means that the token is taken. None means that it is not: call `step`.
        """
        ...


class TokenTable:
    """What each id of a byte-level vocabulary adds to the text. Shared by all streams, never changed."""

    __slots__ = ("json_pieces", "pieces")

    def __init__(self, tokens: Mapping[int, bytes]) -> None:
        """`tokens` are the bytes by id; b"" for those that add nothing. Ids without an entry add nothing either."""
        size = max(tokens, default=-1) + 1
        # str where the token is whole UTF-8 by itself, else bytes.
        self.pieces: list[str | bytes] = [""] * size
        self.json_pieces: list[bytes | None] = [None] * size
        for token_id, content in tokens.items():
            try:
                text = content.decode()
            except UnicodeDecodeError:
                self.pieces[token_id] = content
            else:
                self.pieces[token_id] = text
                self.json_pieces[token_id] = msgspec.json.encode(text) if text else None


class TableDetokenizer:
    """The fast way: bytes from a table, and an unfinished character withheld."""

    __slots__ = ("_json_pieces", "_pending", "_pieces")

    def __init__(self, table: TokenTable) -> None:
        self._pieces = table.pieces
        self._json_pieces = table.json_pieces
        self._pending = b""

    def step(self, token_ids: list[int]) -> str:
        if not self._pending:
            # Nearly every call ends in here. A token of broken UTF-8 (bytes) or an unknown id does not.
            pieces = self._pieces
            try:
                if len(token_ids) == 1:
                    piece = pieces[token_ids[0]]
                    if isinstance(piece, str):
                        return piece
                else:
                    return "".join([pieces[token_id] for token_id in token_ids])  # type: ignore[misc]  # bytes: TypeError
            except (TypeError, IndexError):
                pass
        content = self._pending + b"".join([self._bytes_of(token_id) for token_id in token_ids])
        # Not final: a character that later bytes may still complete is not consumed. A byte that no later one can
        # save becomes U+FFFD at once, in the same places as in the library's lossy decoding of the whole.
        text, consumed = utf_8_decode(content, "replace", False)
        self._pending = content[consumed:]
        return text

    def _bytes_of(self, token_id: int) -> bytes:
        # Padding rows of an embedding have ids but no tokens; `decode` passes over them as well.
        piece = self._pieces[token_id] if token_id < len(self._pieces) else b""
        return piece.encode() if isinstance(piece, str) else piece

    def flush(self) -> str:
        text, self._pending = self._pending.decode("utf-8", "replace"), b""
        return text

    def json_piece(self, token_id: int) -> bytes | None:
        if self._pending:
            return None
        try:
            return self._json_pieces[token_id]
        except IndexError:
            return None


class StreamDetokenizer:
    """The general way: the library decodes a window of ids at every step."""

    __slots__ = ("_hidden", "_pending", "_skip_special_tokens", "_stream", "_tokenizer", "_window")

    def __init__(self, tokenizer: HfTokenizer, *, hidden: frozenset[int] | None) -> None:
        """`hidden` are the special tokens when they are to be skipped, None when they are not."""
        self._tokenizer = tokenizer
        self._skip_special_tokens = hidden is not None
        # Kept from the library, whose window would grow with each of them until there is text again.
        self._hidden = hidden or frozenset()
        self._stream = DecodeStream(skip_special_tokens=self._skip_special_tokens)
        # The ids of the last text that went out, which may decide the spacing of what follows, and those since.
        self._window: list[int] = []
        self._pending: list[int] = []

    def step(self, token_ids: list[int]) -> str:
        if len(token_ids) == 1:
            return self._step_one(token_ids[0])
        return "".join([self._step_one(token_id) for token_id in token_ids])

    def _step_one(self, token_id: int) -> str:
        if token_id in self._hidden:
            return ""
        self._pending.append(token_id)
        try:
            text = self._stream.step(self._tokenizer, token_id)
        except Exception:  # noqa: BLE001 - the library has no finer class for "the text before this token has changed"
            return self._restart()
        if not text:
            return ""
        self._window, self._pending = self._pending, []
        return text

    def _restart(self) -> str:
        """A token that changes text already sent: nothing can be taken back, so go on with the new tokens alone."""
        self._stream = DecodeStream(skip_special_tokens=self._skip_special_tokens)
        self._window, pending, self._pending = [], self._pending, []
        return self._decode(pending)

    def flush(self) -> str:
        if not self._pending:
            return ""
        sent = self._decode(self._window)
        text = self._decode(self._window + self._pending)
        self._stream = DecodeStream(skip_special_tokens=self._skip_special_tokens)
        self._window, self._pending = [], []
        return text[len(sent) :]

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)

    def json_piece(self, token_id: int) -> bytes | None:
        return None
