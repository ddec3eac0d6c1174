"""Text as it grows: all that is told is the whole text, and nothing that was told is taken back."""

import functools

import pytest

from mint_jax.data.tokenizer import Tokenizer
from mint_jax.models import base as base_lib
from mint_jax.rollout.detokenize import HALF, context_of, text_behind
from mint_jax.rollout.stops import Stops
from mint_jax.service.growing import Growing, Places, TokenTexts
from tests.data.tiny_tokenizers import save
from tests.rollout.detokenize_test import KINDS, TEXTS

KINDS_BY_WORD = [kind for kind in KINDS if kind != "byte_level"]


@pytest.fixture(scope="module")
def byte_level():
    return Tokenizer(base_lib.resolve("tiny-random"))


@pytest.fixture(scope="module")
def tokenizer_of(tmp_path_factory):
    def make(kind):
        return Tokenizer(save(tmp_path_factory.mktemp(kind), KINDS[kind]()))

    return make


texts_of = functools.cache(TokenTexts)


def growing_of(tokenizer, *rest, prompt=()):
    return Growing(tokenizer.decode, texts_of(tokenizer), prompt, *rest)


def told(growing, tokens, cuts, final):
    """What is told of tokens that come in pieces, the last being what ``end`` tells."""
    out, ends = [], [*cuts, len(tokens)]
    for begin, end in zip([0, *cuts], ends):
        out.append(growing.add(tokens[begin:end])[1])
        if len(growing.tokens) < end:
            break
    return [*out, growing.end(final(growing.tokens))]


def cuts_of(rng, tokens):
    return sorted(rng.choice(len(tokens) + 1, int(rng.integers(0, 8))).tolist())


def test_pieces_are_the_text_and_end_with_whole_characters(rng, byte_level):
    pool = (
        byte_level.encode("日本語 😀👍🏽 é ü a b  \n<|im_end|> наука 中")
        + rng.integers(0, 49152, 20).tolist()
    )
    for _ in range(300):
        tokens = rng.choice(pool, int(rng.integers(1, 40))).tolist()
        pieces = told(growing_of(byte_level), tokens, cuts_of(rng, tokens), byte_level.decode)
        assert "".join(pieces) == byte_level.decode(tokens)
        assert not any(piece.endswith(HALF) for piece in pieces[:-1])


@pytest.mark.parametrize("kind", KINDS_BY_WORD)
def test_pieces_continue_the_prompt(rng, tokenizer_of, kind):
    tokenizer = tokenizer_of(kind)
    for _ in range(100):
        prompt, text = (
            tokenizer.encode(TEXTS[0]),
            "".join(rng.choice(list("ab é日 t"), int(rng.integers(1, 20))).tolist()),
        )
        tokens = tokenizer.encode(text, special=False)
        right = text_behind(tokenizer.decode, prompt, tokens)
        pieces = told(
            growing_of(tokenizer, prompt=prompt),
            tokens,
            cuts_of(rng, tokens),
            lambda _, right=right: right,
        )
        assert "".join(pieces) == right
        assert not any(HALF in piece for piece in pieces)


def test_a_run_of_bytes_that_is_cut_off_takes_nothing_back(tokenizer_of):
    tokenizer = tokenizer_of("llama")
    tokens = tokenizer.encode("a日本", special=False)[:-1]
    growing = growing_of(tokenizer)
    pieces = [growing.add([token])[1] for token in tokens]
    assert "".join(pieces) == "a日"
    assert "".join(pieces) + growing.end(tokenizer.decode(tokens)) == "a日" + HALF * 2


def test_no_part_of_a_stop_string_is_told(rng, byte_level):
    letters = [81, 82, 83, *byte_level.encode(" a"), *byte_level.encode("日")]
    stopped = 0
    for _ in range(400):
        stop = [
            "".join(rng.choice(list("abc 日"), int(rng.integers(1, 5))).tolist())
            for _ in range(int(rng.integers(1, 4)))
        ]
        tokens = rng.choice(letters, int(rng.integers(1, 40))).tolist()
        end, whole = Stops(byte_level.decode, stop).look(tokens)
        growing = growing_of(byte_level, stop)
        pieces = told(
            growing,
            tokens,
            cuts_of(rng, tokens),
            lambda kept, whole=whole: byte_level.decode(kept) if whole is None else whole,
        )
        assert "".join(pieces) == (byte_level.decode(tokens) if whole is None else whole)
        assert growing.tokens == tokens[:end]
        stopped += end is not None
    assert 50 < stopped < 400


def test_from_a_marker_on_all_is_kept_for_the_end(rng, byte_level):
    text = "Let me look. <tool_call>{}</tool_call>"
    tokens = byte_level.encode(text)
    for _ in range(30):
        pieces = told(
            growing_of(byte_level, (), "<tool_call>"), tokens, cuts_of(rng, tokens), lambda _: text
        )
        assert "Let me look. ".startswith("".join(pieces[:-1]))
        assert "".join(pieces) == text
    assert told(growing_of(byte_level, (), ""), tokens, [3, 5], lambda _: text) == [
        "",
        "",
        "",
        text,
    ]


def test_bytes_of_tokens_are_the_texts(byte_level, tokenizer_of):
    for tokenizer, text in (
        (byte_level, "An été 😀 日本\t<|im_end|>\x00"),
        (tokenizer_of("metaspace"), " ab é 😀日"),
    ):
        texts, tokens = texts_of(tokenizer), tokenizer.encode(text, special=False)
        assert b"".join(map(texts.bytes_of, tokens)).decode() == text
    texts = TokenTexts(byte_level)
    half = byte_level.encode("😀")[-1]
    assert texts.text_of(half).startswith("bytes:\\x")
    assert texts.text_of(81) == "a"
    assert texts.bytes_of(10**6) == b""


@pytest.mark.parametrize("kind", KINDS)
def test_places_are_where_tokens_begin_in_the_text(rng, tokenizer_of, kind):
    """The oracle: the length of the text of all tokens before, wherever that ends with a whole
    character.
    """
    tokenizer, compared = tokenizer_of(kind), 0
    texts = texts_of(tokenizer)
    for prompt in ([], tokenizer.encode(TEXTS[0])):
        for _ in range(50):
            text = " ".join(
                rng.choice(
                    ["a", "été", "日本", "the sky.", "is  blue", "😀"], int(rng.integers(1, 9))
                ).tolist()
            )
            tokens = tokenizer.encode(text, special=False)
            if texts.special.intersection(tokens):
                continue  # unknown tokens are in no text
            tokens.insert(int(rng.integers(len(tokens) + 1)), max(tokenizer.special_ids.values()))
            context = context_of(tokenizer.decode, prompt)
            whole = text_behind(tokenizer.decode, context, tokens)
            places = Places(texts)
            places.add(tokens, whole)
            assert (places.begins[0], places.within(0), places.within(len(whole) + 1)) == (
                0,
                0,
                len(tokens),
            )
            for i, begin in enumerate(places.begins):
                before = text_behind(tokenizer.decode, context, tokens[:i])
                if before and HALF not in before and whole.startswith(before):
                    assert begin == len(before), (tokens, i)
                    compared += 1
    assert compared > 50


@pytest.mark.parametrize("kind", KINDS)
def test_places_of_a_prompt_are_those_of_its_text(tokenizer_of, kind):
    tokenizer = tokenizer_of(kind)
    end = max(tokenizer.special_ids, key=tokenizer.special_ids.__getitem__)
    text = f"the sky is blue {end} and two"
    places, texts = Places(texts_of(tokenizer), shown=True), texts_of(tokenizer)
    tokens = tokenizer.encode(text)
    places.add(tokens, text)
    for token, begin in zip(tokens, places.begins, strict=True):
        name = texts.text_of(token)
        if token not in texts.special or name == end:
            assert text.startswith((name, name.lstrip()), begin), (name, begin)
