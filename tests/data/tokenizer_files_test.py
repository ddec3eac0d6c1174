"""What files can do to text beyond encoding it, against transformers' AutoTokenizer on the same
directory.
"""

import json

import pytest
from transformers import AutoTokenizer

from mint_jax.data.tokenizer import Tokenizer
from mint_jax.errors import UserError
from tests.data.tiny_tokenizers import byte_level, metaspace, save, sentence_piece

PIECES = ["two", " plus", "four", "  ", " ", "\n", "\n\n", "ﬁ", "é", "e\u0301", "日本", "🙂", "▁"]
PIECES += ["Paris", "PARIS", "12", "don't", ".", " ,", " n't", "<s>", "</s>", "<unk>", "<0x0A>"]
PIECES += ["<|im_end|>", "<|im_start|>", "<|endoftext|>", "<tool>", "<|new|>", "<extra>", "[PAD]"]
FIXED = ["", "two plus two", "two plus </s>\ntwo", "x<tool>y <tool> z", "Paris , n't ."]
FIXED += ["a <|im_end|> b", "two<|new|>two <extra>"]


def assert_same(directory, rng):
    theirs, mine = AutoTokenizer.from_pretrained(directory), Tokenizer(directory)
    for text in FIXED + ["".join(rng.choice(PIECES, rng.integers(1, 9))) for _ in range(30)]:
        for special in (True, False):
            ids = theirs(text, add_special_tokens=special).input_ids
            assert mine.encode(text, special) == ids, (text, special)
            assert mine.encode_spans(text, [], special)[0] == ids
        for skip in (True, False):
            wanted = theirs.decode(ids, skip_special_tokens=skip)
            assert mine.decode(ids, skip_special=skip) == wanted, text
    assert mine.vocab_size == max(theirs.get_vocab().values()) + 1
    assert mine.eos_id == theirs.eos_token_id
    specials = {token.content for token in theirs.added_tokens_decoder.values() if token.special}
    assert mine.special_ids == {text: theirs.convert_tokens_to_ids(text) for text in specials}


FLAGS = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)


def added(text, special=True, **flags):
    return {"content": text, **FLAGS, "special": special} | flags


def with_token(source, text, **flags):
    """The flags of an added token, or one more at the end."""
    kept = [token for token in source["added_tokens"] if token["content"] != text]
    ids = {token["content"]: token["id"] for token in source["added_tokens"]}
    last = max(*source["model"]["vocab"].values(), *ids.values()) + 1
    token = {"id": ids.get(text, last), **added(text, **flags)}
    return source | {"added_tokens": sorted([*kept, token], key=lambda token: token["id"])}


TRUNCATION = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
PADDING = {"strategy": "BatchLongest", "direction": "Left", "pad_to_multiple_of": 16}
PADDING |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "<unk>"}
FIRST, SECOND = ({"Sequence": {"id": id, "type_id": i}} for i, id in enumerate("AB"))
BEGIN, END = ({"SpecialToken": {"id": text, "type_id": 0}} for text in ("<s>", "</s>"))
ENDS = {
    "type": "TemplateProcessing",
    "single": [BEGIN, FIRST, END],
    "pair": [FIRST, SECOND],
    "special_tokens": {
        text: {"id": text, "ids": [i], "tokens": [text]} for text, i in (("<s>", 1), ("</s>", 2))
    },
}
FILES = {
    "as it is": byte_level,
    "metaspace": metaspace,
    "padding": lambda: sentence_piece() | {"padding": PADDING, "truncation": TRUNCATION},
    "begin and end": lambda: sentence_piece() | {"post_processor": ENDS},
    "lstrip": lambda: with_token(byte_level(), "<|im_end|>", lstrip=True),
    "in blanks' place": lambda: with_token(sentence_piece(), "<extra>", normalized=True),
}


@pytest.mark.parametrize("name", FILES)
def test_tokenizer_files_give_the_tokens_of_transformers(tmp_path, rng, name):
    assert_same(save(tmp_path, FILES[name]()), rng)


def as_token(text, **flags):
    return {"__type": "AddedToken", **added(text, **flags)}


CONFIGS = {
    "begin and end": {"add_bos_token": True, "add_eos_token": True, "bos_token": "<|im_start|>"},
    "split": {"split_special_tokens": True},
    "with flags": {"eos_token": as_token("<|new|>", lstrip=True, special=False)},
    "further": {"additional_special_tokens": ["<extra>", as_token("<|new|>", rstrip=True)]},
    "a named one in the list": {
        "added_tokens_decoder": {"344": added("<|new|>", special=False, lstrip=True)},
        "pad_token": "<|new|>",
    },
}
NAMES = (
    "{{ bos_token }} {{ eos_token }} {{ pad_token }} {{ image_token }} {{ unk_token is defined }}"
)


@pytest.mark.parametrize("kind", [byte_level, sentence_piece])
@pytest.mark.parametrize("name", CONFIGS)
def test_configs_give_the_tokens_of_transformers(tmp_path, rng, name, kind):
    assert_same(save(tmp_path, kind(), **CONFIGS[name]), rng)
    (tmp_path / "chat_template.jinja").write_text(NAMES)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    wanted = theirs.apply_chat_template([{"role": "user", "content": ""}], tokenize=False)
    assert Tokenizer(tmp_path).render([]) == wanted


QWEN2 = {
    "tokenizer_class": "Qwen2TokenizerFast",
    "pad_token": None,
    "added_tokens_decoder": {"340": added("<|endoftext|>", lstrip=True)},
}
CLASSES = {
    "llama": {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "unk_token": "<unk>"},
    "new": {"tokenizer_class": "LlamaTokenizer", "legacy": False, "add_prefix_space": False},
    "qwen2": QWEN2,
    "qwen3.5": QWEN2 | {"tokenizer_class": "Qwen3_5Tokenizer"},
    "gemma": {"tokenizer_class": "GemmaTokenizerFast", "eos_token": "</s>", "pad_token": "[PAD]"},
    "fast": {"tokenizer_class": "PreTrainedTokenizerFast"},
}
TYPES = ["", "qwen2", "qwen3_5", "qwen3_5_text", "qwen3_next", "gemma3_text", "mistral"]


@pytest.mark.parametrize("model_type", TYPES)
@pytest.mark.parametrize("kind", [byte_level, sentence_piece, metaspace])
@pytest.mark.parametrize("name", CLASSES)
def test_classes_give_the_tokens_of_transformers(tmp_path, rng, model_type, kind, name):
    directory = save(tmp_path, kind(), {"model_type": model_type}, **CLASSES[name])
    is_theirs = model_type not in ("qwen2", "qwen3_5", "mistral")  # these have a class of their own
    if kind is byte_level and name == "gemma" and is_theirs:
        with pytest.raises(UserError, match="lacks the unk_token '<unk>'"):
            Tokenizer(directory)  # transformers fails at the first text
    else:
        assert_same(directory, rng)


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("class_", ["PreTrainedTokenizerFast", "Qwen2Tokenizer"])
def test_older_files_give_the_tokens_of_transformers(tmp_path, rng, mapped, listed, class_):
    by_id = {"340": added("<|endoftext|>"), "342": added("<|im_end|>")}
    config = {"added_tokens_decoder": by_id} if listed else {}
    save(tmp_path, byte_level(), tokenizer_class=class_, **config)
    if mapped:
        end = added("<|new|>", lstrip=True)
        del end["special"]
        found = {"pad_token": "<extra>", "eos_token": end, "additional_special_tokens": ["[PAD]"]}
        (tmp_path / "special_tokens_map.json").write_text(json.dumps(found))
    ids = {"<|im_end|>": 342, "<|im_start|>": 341, "<|new|>": 344, "▁": 345}
    (tmp_path / "added_tokens.json").write_text(json.dumps(ids))
    assert_same(tmp_path, rng)


FORCED = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
CLEANS = {"clean_up_tokenization_spaces": True}
WORDS = {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}
UNIGRAM = {"model": {"type": "Unigram", "vocab": [["a", 0.0]], "unk_id": 0}}
UNIGRAM |= dict.fromkeys(("pre_tokenizer", "decoder", "post_processor"))


@pytest.mark.parametrize(
    ("changes", "config", "message"),
    [
        ({}, {"tokenizer_class": "T5TokenizerFast"}, "tokenizer_class in .* is T5Tokenizer"),
        ({}, CLEANS | {FORCED: True}, "sets clean_up_tokenization_spaces, .* set it to false"),
        (WORDS, CLEANS, "sets clean_up_tokenization_spaces"),
        (UNIGRAM, {"tokenizer_class": "LlamaTokenizer"}, "is a Unigram model"),
    ],
)
def test_settings_without_support_are_refused(tmp_path, changes, config, message):
    save(tmp_path, byte_level() | changes, **config)
    with pytest.raises(UserError, match=message):
        Tokenizer(tmp_path)
