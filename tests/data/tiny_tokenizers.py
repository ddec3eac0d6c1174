"""Tiny tokenizers of the two usual kinds, trained on a few sentences, and the directories that hold
them.
"""

import functools
import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

CORPUS = [
    "The capital of France is Paris and the capital of Italy is Rome.",
    "Hello there, how are you today? I am fine, don't worry.",
    "two plus two is four, one two three four five six seven",
    "Please say a colour. The colour is blue.\n\nuser assistant system tool",
] * 20
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' +"
    " '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ZEPHYR = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + eos_token + '\n' }}{%"
    " endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)


@functools.cache
def _byte_level() -> str:
    made: Any = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.post_processor = processors.ByteLevel(trim_offsets=True)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=340, initial_alphabet=alphabet, show_progress=False)
    )
    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    made.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    made.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    return made.to_str()


@functools.cache
def _sentence_piece() -> str:
    """As Llama 2's: a normalizer that writes blanks as ▁ and one in front, bytes for unknown
    characters, ``<s>`` in front.
    """
    made: Any = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    # words, for training alone
    made.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always")
    special = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=special + [f"<0x{i:02X}>" for i in range(256)],
        initial_alphabet=["▁"],
        show_progress=False,
    )
    made.train_from_iterator(CORPUS, trainer)
    source = json.loads(made.to_str())
    source["pre_tokenizer"] = None
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    front = {"type": "Prepend", "prepend": "▁"}
    source["normalizer"] = {"type": "Sequence", "normalizers": [front, replace]}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    back = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    parts = [back, {"type": "ByteFallback"}, {"type": "Fuse"}, strip]
    source["decoder"] = {"type": "Sequence", "decoders": parts}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    source["added_tokens"] = [
        {"id": i, "content": text, **flags, "special": True} for i, text in enumerate(special)
    ]
    made = Tokenizer.from_str(json.dumps(source))
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return made.to_str()


def byte_level() -> dict[str, Any]:
    return json.loads(_byte_level())


def sentence_piece() -> dict[str, Any]:
    return json.loads(_sentence_piece())


def metaspace() -> dict[str, Any]:
    """As ``sentence_piece``, as transformers writes it since ``legacy=False``."""
    blanks = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
    return sentence_piece() | {"normalizer": None, "pre_tokenizer": blanks}


def save(
    directory: Path, source: dict[str, Any], model: dict[str, Any] | None = None, **config: Any
) -> Path:
    """Writes the three files of a checkpoint that tokenizers come from."""
    directory.mkdir(parents=True, exist_ok=True)
    ends = {token["content"] for token in source["added_tokens"]} & {"<|im_end|>"}
    end = ends.pop() if ends else "</s>"
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end} | config
    (directory / "tokenizer.json").write_text(json.dumps(source))
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "config.json").write_text(json.dumps({"model_type": "llama"} | (model or {})))
    return directory
