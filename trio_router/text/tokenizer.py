"""One model's tokenizer: text to ids and back, its end tokens and its chat template, out of a set of files.

Wraps the tokenizers library so that nothing else touches it. It must not know where the files came from, nor requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING

import msgspec
from tokenizers import Tokenizer as HfTokenizer

from trio_router.errors import BadRequest, RouterError
from trio_router.text.bundle import BadBundle, TokenizerFiles
from trio_router.text.detokenizer import Detokenizer, StreamDetokenizer, TableDetokenizer, TokenTable
from trio_router.text.template import ChatTemplate, load_template

if TYPE_CHECKING:
    from datetime import datetime


class TokenizationFailed(RouterError):
    """The tokenizer broke on a text: its files are at fault, not the caller."""

    code = "tokenization_failed"


class PromptTooLong(BadRequest):
    """A text has more tokens than the model's context."""

    code = "context_length_exceeded"


# Texts are hardly ever longer per token than this, so that the first look at a beginning decides.
_CHARACTERS_PER_TOKEN = 8
_BEGINNING_CHARACTERS = 65_536


class Tokenizer:
    """A loaded tokenizer; safe to share between threads and streams. Made by `load`."""

    def __init__(
        self,
        inner: HfTokenizer,
        *,
        eos_token_ids: frozenset[int],
        is_byte_level: bool,
        template: ChatTemplate | None,
    ) -> None:
        """`is_byte_level`: the decoder is ByteLevel and nothing else, so that every token has bytes of its own."""
        self._inner = inner
        self._is_byte_level = is_byte_level
        # What ends a generation, in ascending order when sorted; empty if the files name none.
        self.eos_token_ids = eos_token_ids
        # The chat template; None when the model has none.
        self.template = template
        # Added tokens included.
        self.vocab_size: int = inner.get_vocab_size(with_added_tokens=True)

    def __repr__(self) -> str:
        way = "table" if self._is_byte_level else "library"
        return f"<Tokenizer of {self.vocab_size} tokens, detokenized by {way}>"

    def encode(self, text: str, *, add_special_tokens: bool = False, max_tokens: int | None = None) -> list[int]:
        """Text to ids. Special tokens written in the text are recognised; `add_special_tokens` adds the model's own.

        Raises PromptTooLong for more than `max_tokens`, without going through a text that is much too long, and
        TokenizationFailed.
        """
        if max_tokens is not None:
            self._refuse_hopeless(text, max_tokens=max_tokens)
        ids = self._ids(text, add_special_tokens=add_special_tokens)
        if max_tokens is not None and len(ids) > max_tokens:
            raise PromptTooLong(f"the prompt has {len(ids)} tokens, the model's context {max_tokens}")
        return ids

    def _refuse_hopeless(self, text: str, *, max_tokens: int) -> None:
        """Look at ever longer beginnings of a text that cannot be told by its length: its ids cost 200 bytes each."""
        length = max(_BEGINNING_CHARACTERS, max_tokens * _CHARACTERS_PER_TOKEN)
        while length < len(text):
            # The cut may break a token into pieces, and those around it may come out otherwise than in the whole.
            if len(self._ids(text[:length], add_special_tokens=False)) > max_tokens + 2 * self._longest_token:
                raise PromptTooLong(f"the prompt has more tokens than the model's context of {max_tokens}")
            length *= 2

    def _ids(self, text: str, *, add_special_tokens: bool) -> list[int]:
        with _library_errors_as(TokenizationFailed, "the tokenizer failed"):
            # The library's `encode` keeps the interpreter's lock all the while, so that a megabyte of text would stop
            # every thread for a second; for batches it lets go, and this form leaves out offsets nobody asks for.
            return self._inner.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """Ids to text, all at once; ids outside the vocabulary are passed over, broken UTF-8 becomes U+FFFD."""
        return self._inner.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def detokenizer(self, *, skip_special_tokens: bool = True) -> Detokenizer:
        """A fresh detokenizer for one stream."""
        if self._is_byte_level:
            return TableDetokenizer(self._visible_table if skip_special_tokens else self._full_table)
        return StreamDetokenizer(self._inner, hidden=self._special_ids if skip_special_tokens else None)

    @cached_property
    def _longest_token(self) -> int:
        return max(map(len, self._inner.get_vocab(with_added_tokens=True)), default=0)

    # Built at the first stream that needs them: a quarter of a second for a vocabulary of 150,000.
    @cached_property
    def _full_table(self) -> TokenTable:
        return TokenTable(self._token_bytes())

    @cached_property
    def _visible_table(self) -> TokenTable:
        hidden = self._special_ids
        return TokenTable({number: b"" if number in hidden else token for number, token in self._token_bytes().items()})

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        added = self._inner.get_added_tokens_decoder()
        return frozenset(number for number, token in added.items() if token.special)

    def _token_bytes(self) -> dict[int, bytes]:
        # Asked id by id, as decoding does: in a careless vocabulary two tokens share one.
        numbers = set(self._inner.get_vocab(with_added_tokens=True).values())
        return {number: _bytes_of(self._inner.id_to_token(number) or "") for number in numbers}


def load(files: TokenizerFiles, *, clock: Callable[[], datetime] | None = None) -> Tokenizer:
    """Load a tokenizer from its files.

    `clock` is what a chat template that asks for the date gets; without one it finds no such function. Raises BadBundle
    when a file is missing or malformed. A malformed chat template is no such error: only rendering needs it.
    """
    description = files.contents.get("tokenizer.json")
    if description is None:
        raise BadBundle("there is no tokenizer.json, the one format that can be loaded; convert the model's tokenizer")
    inner = _load_inner(description)
    # Limits for training batches, which some models ship; a router neither cuts nor pads a prompt.
    inner.no_truncation()
    inner.no_padding()
    return Tokenizer(
        inner,
        eos_token_ids=_eos_token_ids(files, inner=inner),
        is_byte_level=_is_byte_level(_decoder_of(description)),
        template=load_template(files, clock=clock),
    )


def _load_inner(description: bytes) -> HfTokenizer:
    with _library_errors_as(BadBundle, "tokenizer.json cannot be loaded"):
        return HfTokenizer.from_buffer(description)


@contextmanager
def _library_errors_as(kind: type[RouterError], what: str) -> Iterator[None]:
    try:
        yield
    # The library has no finer class, whatever is wrong.
    except Exception as error:
        raise kind(f"{what}: {error}") from error
    # A panic of its Rust half is no Exception, and its class cannot be imported. Release 0.23.3 panics on a subword
    # prefix that its tokens do not have, and on encoding with a normalizer that replaces the empty text.
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise kind(f"{what}: {error}") from error


class _Description(msgspec.Struct):
    """The one part of a tokenizer.json that is read here; the rest, megabytes of it, is skipped unparsed."""

    decoder: object = None


def _decoder_of(description: bytes) -> object:
    try:
        return msgspec.json.decode(description, type=_Description).decoder
    except msgspec.DecodeError as error:
        raise BadBundle(f"tokenizer.json is not a JSON object: {error}") from error


def _is_byte_level(decoder: object) -> bool:
    """Whether this decoder of a tokenizer.json is ByteLevel alone, or a sequence of nothing else."""
    if not isinstance(decoder, dict):
        return False
    if decoder.get("type") == "Sequence":
        parts = decoder.get("decoders")
        return isinstance(parts, list) and len(parts) == 1 and _is_byte_level(parts[0])
    return decoder.get("type") == "ByteLevel"


def _eos_token_ids(files: TokenizerFiles, *, inner: HfTokenizer) -> frozenset[int]:
    """The union of what config.json and generation_config.json name; without either, the tokenizer's own end token."""
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        found |= _ints(files.json_object(name).get("eos_token_id"), name=name)
    if not found:
        found.update(_own_end_token(files.json_object("tokenizer_config.json"), inner=inner))
    return frozenset(found)


def _ints(value: object, *, name: str) -> set[int]:
    found: set[int] = set()
    for item in value if isinstance(value, list) else [] if value is None else [value]:
        if not isinstance(item, int) or isinstance(item, bool) or item < 0:
            raise BadBundle(f"eos_token_id in {name} must be a token id or a list of them, not {value!r}")
        found.add(item)
    return found


def _own_end_token(config: Mapping[str, object], *, inner: HfTokenizer) -> Iterator[int]:
    token = config.get("eos_token")
    content = token.get("content") if isinstance(token, dict) else token
    number = inner.token_to_id(content) if isinstance(content, str) else None
    if number is not None:
        yield number


def _byte_alphabet() -> dict[int, str]:
    """Translation of the characters that byte-level vocabularies write bytes with into the Latin-1 of those bytes.

    Visible Latin-1 characters stand for themselves, the other bytes are written with the code points from 256 up.
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return {byte: chr(byte) for byte in visible} | {256 + rank: chr(byte) for rank, byte in enumerate(hidden)}


_ALPHABET = _byte_alphabet()
_ALPHABET_CHARACTERS = frozenset(map(chr, _ALPHABET))


def _bytes_of(token: str) -> bytes:
    # A token with a character outside the alphabet (an added token with a space, say) stands for its own UTF-8.
    if _ALPHABET_CHARACTERS.issuperset(token):
        return token.translate(_ALPHABET).encode("latin-1")
    return token.encode()
