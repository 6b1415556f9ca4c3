"""Builds the reference worker's tokenizer from `corpus.txt`, byte for byte the same on every machine.

Run `python -m trio_router.engine.assets.build_tokenizer` after an edit of the corpus, the template or a constant below.
The training is written out here, rather than left to the tokenizers library, so that neither its threads nor its
release decide about ties, ids or JSON layout: a test compares what this makes with what is shipped. It must not know
the engine that uses the result.

Ids: 0-255 are the bytes themselves (id == byte), then the merges in the order they were learned, then the special
tokens, so that the vocabulary has exactly `VOCAB_SIZE` entries.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path

from tokenizers.pre_tokenizers import ByteLevel

HERE = Path(__file__).parent

VOCAB_SIZE = 2048
CONTEXT_LENGTH = 8192
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
# The last four stand for media in a prompt: one pad token is repeated for each embedding.
SPECIAL_TOKENS = (
    END_OF_TEXT,
    TURN_START,
    TURN_END,
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
FIRST_SPECIAL_ID = VOCAB_SIZE - len(SPECIAL_TOKENS)

# Each message is a turn; a conversation that does not bring its own system turn gets none.
CHAT_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

# The same for the variant that says it sees: content may be parts, and a picture or a film is one pad between the marks
# of its beginning and end, as in Qwen3-VL's own template.
VISION_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' }}
    {%- if message['content'] is string %}
        {{- message['content'] }}
    {%- else %}
        {%- for part in message['content'] %}
            {%- if part['type'] in ('image', 'image_url') %}
                {{- '<|vision_start|><|image_pad|><|vision_end|>' }}
            {%- elif part['type'] in ('video', 'video_url') %}
                {{- '<|vision_start|><|video_pad|><|vision_end|>' }}
            {%- else %}
                {{- part['text'] }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
VISION_DIRECTORY = "vision"

# Qwen3-VL's: a pad stands for 32 x 32 pixels.
PATCH_SIZE, MERGE_SIZE, TEMPORAL_PATCH_SIZE = 16, 2, 2
IMAGE_PIXELS = (65_536, 16_777_216)
VIDEO_PIXELS = (4_096, 25_165_824)
"""Least and most pixels of an image; of a film, over all its frames."""

# Role names begin a turn, where no space precedes them; the corpus has them only in the middle of sentences.
TURN_WORDS = ("system", "user", "assistant", "tool")

Pair = tuple[str, str]


def byte_symbols() -> list[str]:
    """The printable stand-in of each byte, in byte order, as every byte-level BPE vocabulary writes it.

    Bytes that Latin-1 shows as visible characters stand for themselves; the others get the code points from 256 up.
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    symbols: list[str] = []
    borrowed = 256
    for byte in range(256):
        if byte in visible:
            symbols.append(chr(byte))
        else:
            symbols.append(chr(borrowed))
            borrowed += 1
    return symbols


def split_words(text: str) -> Counter[str]:
    """Count the words of `text` as the finished tokenizer will split it, in byte symbols."""
    splitter = ByteLevel(add_prefix_space=False, use_regex=True)
    words = Counter(word for word, _ in splitter.pre_tokenize_str(text))
    for word in TURN_WORDS:
        words[word] += 2
    return words


class _Trainer:
    """Byte-pair training with the pair counts kept current, instead of recounted, after each merge."""

    def __init__(self, words: Counter[str]) -> None:
        spelled = sorted(words.items())
        self.words = [list(word) for word, _ in spelled]
        self.frequency = [count for _, count in spelled]
        self.counts: Counter[Pair] = Counter()
        self.places: defaultdict[Pair, set[int]] = defaultdict(set)
        for index in range(len(self.words)):
            self._count(index, sign=1)

    def _count(self, index: int, *, sign: int) -> None:
        word = self.words[index]
        for pair in pairwise(word):
            self.counts[pair] += sign * self.frequency[index]
            if sign > 0:
                self.places[pair].add(index)

    def merge_best(self) -> Pair | None:
        """Merge the most frequent pair everywhere; of equals, the one that sorts first. None: nothing repeats."""
        best = min(self.counts, key=lambda pair: (-self.counts[pair], pair))
        if self.counts[best] < 2:
            return None
        for index in self.places.pop(best):
            self._count(index, sign=-1)
            self.words[index] = _joined(self.words[index], best)
            self._count(index, sign=1)
        del self.counts[best]
        return best


def _joined(word: list[str], pair: Pair) -> list[str]:
    result: list[str] = []
    position = 0
    while position < len(word):
        if tuple(word[position : position + 2]) == pair:
            result.append(pair[0] + pair[1])
            position += 2
        else:
            result.append(word[position])
            position += 1
    return result


def learn_merges(words: Counter[str], *, count: int) -> list[Pair]:
    """Learn exactly `count` merges; raises ValueError when the corpus has too little that repeats."""
    trainer = _Trainer(words)
    merges: list[Pair] = []
    while len(merges) < count:
        pair = trainer.merge_best()
        if pair is None:
            raise ValueError(f"the corpus yields {len(merges)} merges, the vocabulary needs {count}")
        merges.append(pair)
    return merges


def tokenizer_json(corpus: str) -> dict[str, object]:
    """The content of tokenizer.json, in the format of the tokenizers library."""
    symbols = byte_symbols()
    merges = learn_merges(split_words(corpus), count=FIRST_SPECIAL_ID - len(symbols))
    vocabulary = {token: number for number, token in enumerate([*symbols, *(a + b for a, b in merges)])}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added_token(number, token) for number, token in _special_ids().items()],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": [f"{first} {second}" for first, second in merges],
        },
    }


def _special_ids() -> dict[int, str]:
    return dict(enumerate(SPECIAL_TOKENS, start=FIRST_SPECIAL_ID))


def _special_id(token: str) -> int:
    return FIRST_SPECIAL_ID + SPECIAL_TOKENS.index(token)


def _added_token(number: int, token: str) -> dict[str, object]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"id": number, "content": token, **flags}


def tokenizer_config(template: str = CHAT_TEMPLATE) -> dict[str, object]:
    """The content of tokenizer_config.json, chat template included."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": CONTEXT_LENGTH,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "bos_token": None,
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "unk_token": None,
        "chat_template": template,
    }


def model_config() -> dict[str, object]:
    """The content of config.json: what little a model without weights can say about itself."""
    return {
        "architectures": ["TinyEnglishForCausalLM"],
        "model_type": "tiny_english",
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": CONTEXT_LENGTH,
        "bos_token_id": None,
        "eos_token_id": _special_id(TURN_END),
        "pad_token_id": _special_id(END_OF_TEXT),
        "vision_start_token_id": _special_id("<|vision_start|>"),
        "vision_end_token_id": _special_id("<|vision_end|>"),
        "image_token_id": _special_id("<|image_pad|>"),
        "video_token_id": _special_id("<|video_pad|>"),
    }


def generation_config() -> dict[str, object]:
    """The content of generation_config.json."""
    return {
        "eos_token_id": [_special_id(TURN_END), _special_id(END_OF_TEXT)],
        "pad_token_id": _special_id(END_OF_TEXT),
        "temperature": 1.0,
        "top_p": 1.0,
    }


def vision_config() -> dict[str, object]:
    """The content of config.json for the variant that says it sees: what tells routers and engines a Qwen3-VL."""
    return {
        **model_config(),
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "vision_config": {
            "patch_size": PATCH_SIZE,
            "spatial_merge_size": MERGE_SIZE,
            "temporal_patch_size": TEMPORAL_PATCH_SIZE,
        },
    }


def preprocessor_config(kind: str, *, pixels: tuple[int, int]) -> dict[str, object]:
    """The content of preprocessor_config.json and its like for films; `pixels` are the least and the most."""
    return {
        f"{kind}_processor_type": f"Qwen3VL{kind.title()}Processor",
        "patch_size": PATCH_SIZE,
        "merge_size": MERGE_SIZE,
        "temporal_patch_size": TEMPORAL_PATCH_SIZE,
        "size": {"shortest_edge": pixels[0], "longest_edge": pixels[1]},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "resample": 3,
    }


def build(corpus: str) -> dict[str, bytes]:
    """Make every shipped file from `corpus`; the result maps file names to contents.

    Those in the directory `vision` are laid over the others for the variant that says it sees.
    """
    contents = {
        "tokenizer.json": tokenizer_json(corpus),
        "tokenizer_config.json": tokenizer_config(),
        "config.json": model_config(),
        "generation_config.json": generation_config(),
        f"{VISION_DIRECTORY}/tokenizer_config.json": tokenizer_config(VISION_TEMPLATE),
        f"{VISION_DIRECTORY}/config.json": vision_config(),
        f"{VISION_DIRECTORY}/preprocessor_config.json": preprocessor_config("image", pixels=IMAGE_PIXELS),
        f"{VISION_DIRECTORY}/video_preprocessor_config.json": preprocessor_config("video", pixels=VIDEO_PIXELS),
    }
    return {
        name: (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode() for name, content in contents.items()
    }


def main() -> None:
    """Write the files beside this script."""
    for name, content in build((HERE / "corpus.txt").read_text(encoding="utf-8")).items():
        (HERE / name).parent.mkdir(exist_ok=True)
        (HERE / name).write_bytes(content)


if __name__ == "__main__":
    main()
