"""Loading a tokenizer from its files: what is read from which, and what is refused how."""

from __future__ import annotations

import json
import sys
import threading
from datetime import datetime
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as HfTokenizer

from trio_router.text.bundle import BadBundle, TokenizerFiles, read_directory
from trio_router.text.tokenizer import PromptTooLong, TokenizationFailed, Tokenizer, load

ASSETS = read_directory(Path(str(resources.files("trio_router.engine.assets"))))
END, END_OF_TEXT = 2043, 2041


def load_with(**replaced: Any) -> Tokenizer:
    """The shipped tokenizer with some of its files replaced; None takes one away."""
    contents = dict(ASSETS.contents)
    for name, value in replaced.items():
        file = f"{name}.json"
        contents.pop(file, None)
        if value is not None:
            contents[file] = value if isinstance(value, bytes) else json.dumps(value).encode()
    return load(TokenizerFiles(contents=contents))


class TestShipped:
    def test_everything_is_found(self):
        tokenizer = load(ASSETS)
        assert tokenizer.vocab_size == 2048
        assert tokenizer.eos_token_ids == {END, END_OF_TEXT}
        assert repr(tokenizer) == "<Tokenizer of 2048 tokens, detokenized by table>"

    def test_a_chat_becomes_a_prompt_becomes_ids_becomes_the_prompt(self):
        tokenizer = load(ASSETS)
        assert tokenizer.template is not None
        prompt = tokenizer.template.render([{"role": "user", "content": "Hello, where is the harbour?"}])
        assert prompt == "<|im_start|>user\nHello, where is the harbour?<|im_end|>\n<|im_start|>assistant\n"
        token_ids = tokenizer.encode(prompt)
        assert token_ids.count(END) == 1
        assert tokenizer.decode(token_ids, skip_special_tokens=False) == prompt
        assert tokenizer.decode(token_ids) == "user\nHello, where is the harbour?\nassistant\n"

    def test_the_clock_reaches_the_template(self):
        contents = {**ASSETS.contents, "chat_template.jinja": b"{{ strftime_now('%d.%m.') }}"}
        tokenizer = load(TokenizerFiles(contents=contents), clock=lambda: datetime(2025, 5, 4))
        assert tokenizer.template is not None
        assert tokenizer.template.render([]) == "04.05."


class TestEncoding:
    def test_the_model_s_own_special_tokens_are_added_only_on_request(self):
        inner = HfTokenizer.from_buffer(ASSETS.contents["tokenizer.json"])
        description = json.loads(inner.to_str())
        description["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [2042], "tokens": ["<|im_start|>"]}},
        }
        tokenizer = load_with(tokenizer=description)
        plain = tokenizer.encode("the harbour")
        assert tokenizer.encode("the harbour", add_special_tokens=True) == [2042, *plain]

    def test_other_threads_run_while_a_long_text_is_encoded(self, monkeypatch: pytest.MonkeyPatch):
        tokenizer = load(ASSETS)
        begins, ended = threading.Event(), threading.Event()

        def encode() -> None:
            begins.set()
            tokenizer.encode("hello " * 200_000)
            ended.set()

        interval = sys.getswitchinterval()
        sys.setswitchinterval(1000)  # from here on a thread runs until it lets go of the lock by itself
        try:
            thread = threading.Thread(target=encode)
            thread.start()
            begins.wait()
            ran_beside_it = not ended.is_set()
            thread.join()
        finally:
            sys.setswitchinterval(interval)
        assert ran_beside_it

    def test_a_prompt_that_just_fits_is_let_through_and_one_token_more_is_not(self):
        tokenizer = load(ASSETS)
        text = "Hello, where is the harbour?"
        count = len(tokenizer.encode(text))
        assert len(tokenizer.encode(text, max_tokens=count)) == count
        with pytest.raises(PromptTooLong, match=rf"the prompt has {count} tokens, the model's context {count - 1}"):
            tokenizer.encode(text, max_tokens=count - 1)

    @pytest.mark.parametrize("text", ["hello ", " ", "x", "日本語", "<|im_end|>"])
    def test_of_a_text_that_is_much_too_long_only_a_beginning_is_encoded(self, text: str, monkeypatch):
        tokenizer = load(ASSETS)
        encoded: list[int] = []
        whole = tokenizer._ids
        monkeypatch.setattr(
            tokenizer, "_ids", lambda text, **options: encoded.append(len(text)) or whole(text, **options)
        )
        endless = text * 500_000
        with pytest.raises(PromptTooLong, match="more tokens than the model's context of 1000") as caught:
            tokenizer.encode(endless, max_tokens=1000)
        assert sum(encoded) < 200_000
        assert (caught.value.http_status, caught.value.error_code) == (400, "context_length_exceeded")

    def test_a_long_text_of_few_tokens_is_let_through(self):
        """What a token may stand for has no bound: only the count decides."""
        description = json.loads(ASSETS.contents["tokenizer.json"])
        token = "long" * 2500
        description["added_tokens"].append(
            {"id": 2048, "content": token, "special": False, "normalized": False, "single_word": False, "lstrip": False}
            | {"rstrip": False}
        )
        tokenizer = load_with(tokenizer=description)
        assert tokenizer.encode(token * 100, max_tokens=100) == [2048] * 100

    def test_limits_meant_for_training_do_not_cut_or_pad_a_prompt(self):
        inner = HfTokenizer.from_buffer(ASSETS.contents["tokenizer.json"])
        inner.enable_truncation(3)
        inner.enable_padding(length=50)
        tokenizer = load_with(tokenizer=json.loads(inner.to_str()))
        assert tokenizer.encode("the harbour wakes before the town") == load(ASSETS).encode(
            "the harbour wakes before the town"
        )
        assert len(tokenizer.encode("the harbour wakes before the town")) > 3


class TestVocabulary:
    def test_tokens_that_share_an_id_are_written_as_the_library_writes_that_id(self):
        description = json.loads(ASSETS.contents["tokenizer.json"])
        # "\n" gets the id of "!", in a vocabulary that says nothing about which of them it means.
        description["model"]["vocab"]["Ċ"] = ord("!")
        tokenizer = load_with(tokenizer=description)
        assert tokenizer.detokenizer().step([ord("!")]) == tokenizer.decode([ord("!")])

    def test_ids_without_a_token_add_nothing(self):
        tokenizer = load(ASSETS)
        assert tokenizer.detokenizer().step([ord("a"), 2048, 999_999, ord("b")]) == "ab"
        assert tokenizer.decode([ord("a"), 2048, 999_999, ord("b")]) == "ab"


class TestEndTokens:
    @pytest.mark.parametrize(
        ("config", "generation", "expected"),
        [
            ({"eos_token_id": 1}, {"eos_token_id": 2}, {1, 2}),
            ({"eos_token_id": [1, 2]}, {"eos_token_id": [2, 3]}, {1, 2, 3}),
            ({"eos_token_id": 1}, None, {1}),
            (None, {"eos_token_id": [5]}, {5}),
            ({"eos_token_id": None}, {"eos_token_id": 7}, {7}),
            ({"eos_token_id": 0}, {}, {0}),
        ],
    )
    def test_are_the_union_of_both_configurations(self, config: object, generation: object, expected: set[int]):
        assert load_with(config=config, generation_config=generation).eos_token_ids == expected

    @pytest.mark.parametrize("token", ["<|im_end|>", {"content": "<|im_end|>", "special": True}])
    def test_without_either_the_tokenizer_s_own_end_token_serves(self, token: object):
        tokenizer = load_with(config={}, generation_config=None, tokenizer_config={"eos_token": token})
        assert tokenizer.eos_token_ids == {END}

    @pytest.mark.parametrize("token", [None, "<|never heard of|>", 3])
    def test_without_any_there_are_none(self, token: object):
        tokenizer = load_with(config=None, generation_config=None, tokenizer_config={"eos_token": token})
        assert tokenizer.eos_token_ids == frozenset()

    @pytest.mark.parametrize("value", ["2", 1.5, True, [1, "2"], -1, {"a": 1}])
    def test_what_is_no_token_id_is_refused_by_file(self, value: object):
        with pytest.raises(BadBundle, match=r"eos_token_id in generation_config\.json"):
            load_with(generation_config={"eos_token_id": value})


class TestRefusals:
    def test_without_the_one_format_the_remedy_is_told(self):
        with pytest.raises(BadBundle, match=r"there is no tokenizer\.json.*convert") as caught:
            load_with(tokenizer=None)
        assert (caught.value.error_code, caught.value.http_status) == ("tokenizer_load_failed", 503)

    @pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"\xff", b'{"version": "1.0", "model": {"type": "X"}}'])
    def test_a_malformed_tokenizer_is_named(self, content: bytes):
        with pytest.raises(BadBundle, match=r"tokenizer\.json cannot be loaded"):
            load_with(tokenizer=content)

    def test_a_panic_inside_the_library_while_loading_is_an_error_like_others(self):
        description = json.loads(ASSETS.contents["tokenizer.json"])
        description["model"]["continuing_subword_prefix"] = "é"
        with pytest.raises(BadBundle, match=r"tokenizer\.json cannot be loaded: slice index"):
            load_with(tokenizer=description)

    def test_a_panic_inside_the_library_while_encoding_is_an_error_like_others(self):
        description = json.loads(ASSETS.contents["tokenizer.json"])
        description["normalizer"] = {"type": "Replace", "pattern": {"String": ""}, "content": "x"}
        with pytest.raises(TokenizationFailed, match="the tokenizer failed: index out of bounds") as caught:
            load_with(tokenizer=description).encode("crème 🦔")
        assert (caught.value.error_code, caught.value.http_status) == ("tokenization_failed", 500)

    def test_what_is_no_failure_of_the_library_passes_through(self, monkeypatch: pytest.MonkeyPatch):
        def interrupted(description: bytes) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(HfTokenizer, "from_buffer", interrupted)
        with pytest.raises(KeyboardInterrupt):
            load(ASSETS)

    @pytest.mark.parametrize("name", ["config", "generation_config", "tokenizer_config", "special_tokens_map"])
    def test_a_malformed_configuration_is_named(self, name: str):
        with pytest.raises(BadBundle, match=rf"{name}\.json is not a JSON object"):
            load_with(**{name: b"{"})

    def test_a_malformed_template_is_not_refused_here(self):
        tokenizer = load_with(tokenizer_config={"chat_template": "{% if"})
        assert tokenizer.encode("text without a chat")


BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}


class TestWay:
    @pytest.mark.parametrize(
        ("decoder", "way"),
        [
            (BYTE_LEVEL, "table"),
            ({"type": "Sequence", "decoders": [BYTE_LEVEL]}, "table"),
            ({"type": "Sequence", "decoders": [BYTE_LEVEL, {"type": "Fuse"}]}, "library"),
            ({"type": "Fuse"}, "library"),
            (None, "library"),
        ],
    )
    def test_only_a_decoder_that_is_byte_level_alone_uses_the_table(self, decoder: object, way: str):
        description = json.loads(ASSETS.contents["tokenizer.json"])
        assert repr(load_with(tokenizer={**description, "decoder": decoder})).endswith(f"by {way}>")
