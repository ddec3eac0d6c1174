"""What files can do to text beyond encoding it, against transformers' AutoTokenizer on the same
directory.
"""

import json

import pytest
from transformers import AutoTokenizer

from mint_jax.data.tokenizer import Tokenizer
from mint_jax.errors import UserError
from tests.data.tiny_tokenizers import byte_level, metaspace, save, sentence_piece

PIECES = [
    *(
        "two",
        " plus",
        "four",
        "  ",
        " ",
        "\n",
        "\n\n",
        "ﬁ",
        "é",
        "e\u0301",
        "日本",
        "🙂",
        "Paris",
        "PARIS",
        "12",
        "don't",
        ".",
        " ,",
        " n't",
    ),
    *(
        "<s>",
        "</s>",
        "<unk>",
        "<|im_end|>",
        "<|im_start|>",
        "<|endoftext|>",
        "<tool>",
        "<|new|>",
        "<extra>",
        "[PAD]",
        "▁",
        "<0x0A>",
    ),
]
FIXED = [
    "",
    "two plus two",
    "two plus </s>\ntwo",
    "a <|im_end|> b",
    "x<tool>y <tool> z",
    "two<|new|>two <extra>",
    "Paris , n't .",
]


def assert_same(directory, rng, **ours):
    theirs, mine = AutoTokenizer.from_pretrained(directory), Tokenizer(directory)
    for text in FIXED + ["".join(rng.choice(PIECES, rng.integers(1, 9))) for _ in range(30)]:
        for special in (True, False):
            ids = theirs(text, add_special_tokens=special).input_ids
            assert mine.encode(text, special) == ids, (text, special)
            assert mine.encode_spans(text, [], special)[0] == ids
        for skip in (True, False):
            assert mine.decode(ids, skip_special=skip) == theirs.decode(
                ids, skip_special_tokens=skip
            ), text
    assert mine.vocab_size == max(theirs.get_vocab().values()) + 1
    assert mine.eos_id == theirs.eos_token_id
    specials = {token.content for token in theirs.added_tokens_decoder.values() if token.special}
    assert mine.special_ids == {text: theirs.convert_tokens_to_ids(text) for text in specials}
    return theirs, mine


FLAGS = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)


def added(text, special=True, **flags):
    return {"content": text, **FLAGS, "special": special} | flags


def with_part(source, **parts):
    return source | parts


def with_token(source, text, **flags):
    """The flags of an added token, or one more at the end."""
    others = [token for token in source["added_tokens"] if token["content"] != text]
    ids = [token["id"] for token in source["added_tokens"] if token["content"] == text]
    last = (
        max(
            [*source["model"]["vocab"].values(), *(token["id"] for token in source["added_tokens"])]
        )
        + 1
    )
    token = {"id": ids[0] if ids else last, **added(text, **flags)}
    return source | {"added_tokens": sorted([*others, token], key=lambda token: token["id"])}


TRUNCATION = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
PADDING = {
    **{"strategy": {"Fixed": 40}, "direction": "Right", "pad_to_multiple_of": None},
    **{"pad_id": 0, "pad_type_id": 0, "pad_token": "<unk>"},
}
LEFT = PADDING | {"strategy": "BatchLongest", "direction": "Left", "pad_to_multiple_of": 16}
ENDS = {
    "type": "TemplateProcessing",
    "single": [
        {"SpecialToken": {"id": "<s>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
        {"SpecialToken": {"id": "</s>", "type_id": 0}},
    ],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {
        text: {"id": text, "ids": [i], "tokens": [text]} for text, i in (("<s>", 1), ("</s>", 2))
    },
}
FILES = {
    "as it is": lambda: byte_level(),
    "sentence piece": lambda: sentence_piece(),
    "metaspace": lambda: metaspace(),
    "padding left": lambda: with_part(sentence_piece(), padding=LEFT, truncation=TRUNCATION),
    "begin and end": lambda: with_part(sentence_piece(), post_processor=ENDS),
    "lstrip": lambda: with_token(byte_level(), "<|im_end|>", lstrip=True),
    "in blanks' place": lambda: with_token(sentence_piece(), "<extra>", normalized=True),
}


@pytest.mark.parametrize("name", FILES)
def test_tokenizer_files_give_the_tokens_of_transformers(tmp_path, rng, name):
    assert_same(save(tmp_path, FILES[name]()), rng)


CONFIGS = {
    "begin and end": {"add_bos_token": True, "add_eos_token": True, "bos_token": "<|im_start|>"},
    "split": {"split_special_tokens": True},
    "with flags": {
        "eos_token": {"__type": "AddedToken", **added("<|new|>", lstrip=True, special=False)}
    },
    "further, by the older name": {
        "additional_special_tokens": [
            "<extra>",
            {"__type": "AddedToken", **added("<|new|>", rstrip=True)},
        ]
    },
    "a named one in the list": {
        "added_tokens_decoder": {"344": added("<|new|>", special=False, lstrip=True)},
        "pad_token": "<|new|>",
    },
}


@pytest.mark.parametrize("kind", [byte_level, sentence_piece])
@pytest.mark.parametrize("name", CONFIGS)
def test_configs_give_the_tokens_of_transformers(tmp_path, rng, name, kind):
    theirs, mine = assert_same(save(tmp_path, kind(), **CONFIGS[name]), rng)
    template = (
        "{{ bos_token }} {{ eos_token }} {{ pad_token }} {{ image_token }} {{ unk_token is"
        " defined }}"
    )
    (tmp_path / "chat_template.jinja").write_text(template)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert Tokenizer(tmp_path).render([]) == theirs.apply_chat_template(
        [{"role": "user", "content": ""}], tokenize=False
    )


@pytest.mark.parametrize("model_type", ["qwen2", None])
@pytest.mark.parametrize("kind", [byte_level, sentence_piece, metaspace])
@pytest.mark.parametrize(
    "config",
    [
        {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "unk_token": "<unk>"},
        {"tokenizer_class": "LlamaTokenizer", "legacy": False, "add_prefix_space": False},
        {
            "tokenizer_class": "Qwen2TokenizerFast",
            "pad_token": None,
            "added_tokens_decoder": {"340": added("<|endoftext|>", lstrip=True)},
        },
        {"tokenizer_class": "PreTrainedTokenizerFast"},
    ],
    ids=lambda config: "-".join(map(str, config.values())),
)
def test_classes_give_the_tokens_of_transformers(tmp_path, rng, model_type, kind, config):
    assert_same(
        save(
            tmp_path,
            kind(),
            {"model_type": model_type} if model_type else {"model_type": ""},
            **config,
        ),
        rng,
    )


@pytest.mark.parametrize(
    "files",
    [("added_tokens",), ("special_tokens_map", "added_tokens")],
    ids=str,
)
@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("class_", ["PreTrainedTokenizerFast", "Qwen2Tokenizer"])
def test_older_files_give_the_tokens_of_transformers(tmp_path, rng, files, listed, class_):
    config = (
        {"added_tokens_decoder": {"340": added("<|endoftext|>"), "342": added("<|im_end|>")}}
        if listed
        else {}
    )
    save(tmp_path, byte_level(), tokenizer_class=class_, **config)
    if "special_tokens_map" in files:
        told = {
            "pad_token": "<extra>",
            "eos_token": added("<|new|>", lstrip=True),
            "additional_special_tokens": ["[PAD]"],
        }
        told["eos_token"].pop("special")
        (tmp_path / "special_tokens_map.json").write_text(json.dumps(told))
    if "added_tokens" in files:
        (tmp_path / "added_tokens.json").write_text(
            json.dumps({"<|im_end|>": 342, "<|im_start|>": 341, "<|new|>": 344, "▁": 345})
        )
    assert_same(tmp_path, rng)


@pytest.mark.parametrize(
    ("source", "config", "says"),
    [
        (
            byte_level,
            {"tokenizer_class": "GemmaTokenizerFast"},
            "tokenizer_class in .* is GemmaTokenizer, .* PreTrainedTokenizerFast to take",
        ),
        (
            byte_level,
            {
                "clean_up_tokenization_spaces": True,
                "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output": True,
            },
            "sets clean_up_tokenization_spaces, .* set it to false",
        ),
        (
            lambda: with_part(
                byte_level(), model={"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}
            ),
            {"clean_up_tokenization_spaces": True},
            "clean_up",
        ),
        (
            lambda: with_part(
                byte_level(), model={"type": "Unigram", "vocab": [["a", 0.0]], "unk_id": 0}
            ),
            {"tokenizer_class": "LlamaTokenizer"},
            "ByteLevel|Unigram",
        ),
    ],
)
def test_what_is_not_supported_is_refused(tmp_path, source, config, says):
    made = source()
    if config.get("tokenizer_class") == "LlamaTokenizer":
        made = made | {"pre_tokenizer": None, "decoder": None, "post_processor": None}
    save(tmp_path, made, **config)
    with pytest.raises(UserError, match=says):
        Tokenizer(tmp_path)
