"""SentencePiece's model files against transformers' AutoTokenizer on the same directory. It
reads them by their maker's library.
"""

import json

import pytest
import sentencepiece

from mint_jax.data.tokenizer import Tokenizer
from mint_jax.errors import UserError
from tests.data.ranked_tokens_test import SCRIPTS
from tests.data.tiny_tokenizers import CORPUS
from tests.data.tokenizer_files_test import assert_same


def write(directory, rng, model_type="bpe", text_type="llama", **config):
    corpus = [*CORPUS, *SCRIPTS.values()]
    (directory / "corpus.txt").write_text("\n".join(rng.permutation(corpus)))
    sentencepiece.SentencePieceTrainer.train(
        input=str(directory / "corpus.txt"),
        model_prefix=str(directory / "tokenizer"),
        vocab_size=int(rng.integers(900, 1100)),
        model_type=model_type,
        byte_fallback=True,
        user_defined_symbols=["<tool>", "  "],
        control_symbols=["<|im_end|>"],
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        hard_vocab_limit=False,
        pad_id=3,
        minloglevel=2,
    )
    (directory / "config.json").write_text(json.dumps({"model_type": text_type}))
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


LLAMA = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>"}
GEMMA = LLAMA | {"tokenizer_class": "GemmaTokenizer"}
CONFIGS = {
    "llama": LLAMA,
    "begin and end": LLAMA | {"add_bos_token": True, "add_eos_token": True},
    "no blank in front": LLAMA | {"add_prefix_space": False, "add_bos_token": True},
    "gemma": GEMMA | {"add_bos_token": True},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_model_files_give_the_tokens_of_transformers(tmp_path, rng, name):
    text_type = "gemma3_text" if name == "gemma" else "llama"
    assert_same(write(tmp_path, rng, text_type=text_type, **CONFIGS[name]), rng)


@pytest.mark.parametrize(
    ("config", "model_type", "content", "message"),
    [
        ({"tokenizer_class": "QwenTokenizer"}, "bpe", None, "tokenizer_config.json says Qwen"),
        ({"tokenizer_class": None}, "bpe", None, "tokenizer_config.json says None"),
        ({}, "unigram", None, "has model_type 1, expected 2"),
        ({}, "bpe", b"YQ== 0\nYg== 1\n", "is no SentencePiece model"),  # Llama 3's ranked bytes
        ({"add_bos_token": True, "bos_token": "<b>"}, "bpe", None, "lacks the bos_token"),
    ],
)
def test_unsuited_model_files_are_refused(tmp_path, rng, config, model_type, content, message):
    write(tmp_path, rng, model_type, **LLAMA | config)
    if content is not None:
        (tmp_path / "tokenizer.model").write_bytes(content)
    with pytest.raises(UserError, match=message):
        Tokenizer(tmp_path)
