"""The reference worker's shipped model files: made by the script beside them, small, and consistent in themselves."""

from __future__ import annotations

import json
from importlib import resources

import pytest
from tokenizers import Tokenizer

from trio_router.engine.assets import build_tokenizer
from trio_router.engine.model import VISION, load_model
from trio_router.text.bundle import unpack

SHIPPED = resources.files("trio_router.engine.assets")
CORPUS = (SHIPPED / "corpus.txt").read_text(encoding="utf-8")
VISION_FILES = (
    "vision/tokenizer_config.json",
    "vision/config.json",
    "vision/preprocessor_config.json",
    "vision/video_preprocessor_config.json",
)
FILES = ("tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json", *VISION_FILES)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_str((SHIPPED / "tokenizer.json").read_text(encoding="utf-8"))


def test_the_shipped_files_are_what_the_script_makes_of_the_corpus():
    built = build_tokenizer.build(CORPUS)
    assert tuple(built) == FILES
    for name in FILES:
        assert (SHIPPED / name).read_bytes() == built[name], f"{name}: run the build script again"


def test_everything_together_stays_small():
    sizes = [len((SHIPPED / name).read_bytes()) for name in (*FILES, "corpus.txt")]
    assert sum(sizes) <= 300 * 1024
    assert 20 * 1024 <= len(CORPUS.encode()) <= 60 * 1024


def test_a_corpus_that_repeats_too_little_is_refused_with_the_numbers():
    with pytest.raises(ValueError, match=r"yields \d+ merges, the vocabulary needs \d+"):
        build_tokenizer.build("the cat and the dog and the cat")


def test_byte_ids_are_the_bytes(tokenizer: Tokenizer):
    for byte in range(128):
        assert tokenizer.decode([byte], skip_special_tokens=False) == chr(byte)
    assert tokenizer.decode(list("12 °C, crème 🦔".encode())) == "12 °C, crème 🦔"


def test_special_tokens_close_the_vocabulary(tokenizer: Tokenizer):
    assert tokenizer.get_vocab_size() == build_tokenizer.VOCAB_SIZE
    ids = [tokenizer.token_to_id(token) for token in build_tokenizer.SPECIAL_TOKENS]
    assert ids == list(range(build_tokenizer.FIRST_SPECIAL_ID, build_tokenizer.VOCAB_SIZE))
    assert tokenizer.encode("<|im_start|>user").ids[0] == ids[1]


@pytest.mark.parametrize("text", [CORPUS, "naïve 東京 🦔\r\n\ttab  two spaces", ""], ids=["corpus", "foreign", "empty"])
def test_any_text_survives_a_round_trip(tokenizer: Tokenizer, text: str):
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_the_corpus_is_cut_into_words_rather_than_letters(tokenizer: Tokenizer):
    assert len(CORPUS) / len(tokenizer.encode(CORPUS).ids) > 3.5


def test_the_corpus_is_plain_sentences_in_paragraphs():
    for paragraph in CORPUS.strip("\n").split("\n\n"):
        for sentence in paragraph.split("\n"):
            assert sentence[0].isupper(), sentence
            assert sentence[-1] in ".?", sentence
            assert sentence == " ".join(sentence.split())


def test_no_sentence_is_written_twice():
    sentences = [line for line in CORPUS.split("\n") if line]
    assert len(set(sentences)) == len(sentences) > 600


def test_the_configurations_agree_with_the_vocabulary(tokenizer: Tokenizer):
    names = ("config.json", "generation_config.json", "tokenizer_config.json")
    model, generation, config = (json.loads((SHIPPED / name).read_bytes()) for name in names)
    assert model["vocab_size"] == tokenizer.get_vocab_size()
    assert model["eos_token_id"] == tokenizer.token_to_id(config["eos_token"])
    assert generation["eos_token_id"] == [tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")]
    assert model["image_token_id"] == tokenizer.token_to_id("<|image_pad|>")


class TestTheVariantThatSees:
    @pytest.fixture
    def model(self):
        return load_model(over=VISION)

    def test_it_says_what_a_qwen3_vl_says(self, model):
        assert model.config["model_type"] == "qwen3_vl"
        ids = [model.config[name] for name in ("image_token_id", "video_token_id")]
        assert ids == [model.tokenizer.encode(text)[0] for text in ("<|image_pad|>", "<|video_pad|>")]

    def test_its_template_has_one_anchor_for_each_picture_and_film(self, model):
        content = [
            {"type": "text", "text": "Look: "},
            {"type": "image"},
            {"type": "video"},
            {"type": "text", "text": "And?"},
        ]
        prompt = model.tokenizer.template.render([{"role": "user", "content": content}])
        assert prompt == (
            "<|im_start|>user\nLook: <|vision_start|><|image_pad|><|vision_end|>"
            "<|vision_start|><|video_pad|><|vision_end|>And?<|im_end|>\n<|im_start|>assistant\n"
        )

    def test_a_conversation_in_text_comes_out_as_from_the_other_one(self, model):
        conversation = [{"role": "user", "content": "Good morning."}]
        texts = [each.tokenizer.template.render(conversation) for each in (model, load_model())]
        assert texts[0] == texts[1]

    def test_its_bundle_is_the_whole_model(self, model):
        files = unpack(model.bundle, sha256=model.bundle_sha256)
        assert files.json_object("config.json")["model_type"] == "qwen3_vl"
        assert "tokenizer.json" in files.contents
        assert "preprocessor_config.json" in files.contents
