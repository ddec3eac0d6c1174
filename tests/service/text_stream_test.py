"""Streamed text is final and joins to the whole text; log-probabilities stand where their tokens
do, for tokenizers of several kinds.
"""

import functools

import pytest

from mint_jax.data.tokenizer import Tokenizer
from mint_jax.models import base as base_lib
from mint_jax.rollout.detokenize import HALF, Stops, context_of, text_behind
from mint_jax.rollout.request import Completion
from mint_jax.service.openai_types import CompletionBody, spec_of
from mint_jax.service.text_stream import Offsets, TextStream, TokenTexts
from mint_jax.service.validation import check
from tests.data.tiny_tokenizers import save
from tests.rollout.detokenize_test import KINDS, TEXTS
from tests.service.openai_world import whole_and_streamed

PROMPT = "The capital of France is"
texts_of = functools.cache(TokenTexts)


@pytest.fixture(scope="module")
def byte_level():
    return Tokenizer(base_lib.resolve("tiny-random"))


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request, tmp_path_factory):
    return Tokenizer(save(tmp_path_factory.mktemp(request.param), KINDS[request.param]()))


def streamed(rng, tokenizer, tokens, final, **settings):
    """Returns the parts of tokens that arrive in random pieces, and the stream."""
    stream = TextStream(texts_of(tokenizer), **settings)
    cuts = sorted(rng.choice(len(tokens) + 1, int(rng.integers(0, 8))).tolist())
    parts = []
    for begin, end in zip([0, *cuts], [*cuts, len(tokens)]):
        parts.append(stream.add(tokens[begin:end]))
        if len(stream.tokens) < end:  # a stop string
            break
    return [*parts, stream.end(final)], stream


def test_stop_strings_are_never_streamed(rng, byte_level):
    letters = [81, 82, 83, *byte_level.encode(" a"), *byte_level.encode("日")]
    stopped = 0
    for _ in range(400):
        counts = rng.integers(1, 5, int(rng.integers(1, 4)))
        stop = ["".join(rng.choice(list("abc 日"), count).tolist()) for count in counts]
        tokens = rng.choice(letters, int(rng.integers(1, 40))).tolist()
        end, whole = Stops(byte_level.decode, stop).look(tokens)
        final = byte_level.decode(tokens) if whole is None else whole
        parts, stream = streamed(rng, byte_level, tokens, final, stop=stop)
        assert "".join(parts) == final
        assert stream.tokens == tokens[:end]
        stopped += end is not None
    assert 50 < stopped < 400


def test_offsets_are_lengths_of_the_text_before(rng, tokenizer):
    """The oracle is the decoded text of all earlier tokens, where it ends with a whole
    character.
    """
    texts, compared = texts_of(tokenizer), 0
    words = ["a", "été", "日本", "the sky.", "is  blue", "😀"]
    for prompt in ([], tokenizer.encode(TEXTS[0])):
        for _ in range(50):
            text = " ".join(rng.choice(words, int(rng.integers(1, 9))).tolist())
            tokens = tokenizer.encode(text, special=False)
            if texts.special.intersection(tokens):
                continue  # unknown tokens are in no text
            tokens.insert(int(rng.integers(len(tokens) + 1)), max(tokenizer.special_ids.values()))
            context = context_of(tokenizer.decode, prompt)
            whole = text_behind(tokenizer.decode, context, tokens)
            offsets = Offsets(texts, prompt)
            offsets.add(tokens, whole)
            assert (offsets.starts[0], offsets.within(len(whole) + 1)) == (0, len(tokens))
            for i, start in enumerate(offsets.starts):
                before = text_behind(tokenizer.decode, context, tokens[:i])
                if before and HALF not in before and whole.startswith(before):
                    assert start == len(before), (tokens, i)
                    compared += 1
    assert compared > 50


def test_offsets_around_parts_of_characters(byte_level):
    """A part counts as one character: the whole one, or a replacement if the rest is missing."""
    texts, emoji = texts_of(byte_level), byte_level.encode("😀")
    assert len(emoji) > 1
    for prompt, tokens, starts in (
        ([], [81, *emoji, 82], [0, *[1] * len(emoji), 2]),
        ([], [emoji[0], 81, 82], [0, 1, 2]),
        ([81, *emoji[:-1]], [emoji[-1], 81], [0, 1]),  # the prompt begins the character
        (emoji[:-1], [81, 82], [0, 1]),
    ):
        offsets = Offsets(texts, prompt)
        text = text_behind(byte_level.decode, context_of(byte_level.decode, prompt), tokens)
        offsets.add(tokens, text)
        assert offsets.starts == starts, (prompt, tokens)


def answered(tokenizer, tokens, stop=(), **body):
    """Returns a choice of tokens after PROMPT, and the chunks of the same as a stream."""
    prompt = tokenizer.encode(PROMPT)
    end, text = Stops(tokenizer.decode, stop, prompt).look(tokens) if stop else (None, None)
    tokens = tokens[:end]
    if text is None:
        text = text_behind(tokenizer.decode, context_of(tokenizer.decode, prompt), tokens)
    scores, finish = [-float(i) for i in range(len(tokens))], "length" if end is None else "stop"
    echoed = [-0.5] * (len(prompt) - 1)
    done = Completion(tokens, scores, scores, finish, text, prompt_logprobs=echoed)

    fields = {"model": "m", "prompt": PROMPT, "stop": list(stop), "logprobs": 0, **body}
    spec = spec_of(check(CompletionBody, fields), tokenizer, 512)
    choice, parts = whole_and_streamed(spec, texts_of(tokenizer), done)
    for name in ("token_logprobs", "text_offset"):
        joined = [value for part in parts for value in part["logprobs"][name]]
        assert joined == choice["logprobs"][name], name
    if HALF not in text:  # see ``TextStream``
        assert "".join(part["text"] for part in parts) == choice["text"]
    return choice


@pytest.mark.parametrize(
    ("echo", "stop"), [(False, ()), (True, ()), (False, (" Paris",)), (False, ("is, and",))]
)
def test_prompt_and_completion_join_and_tokens_are_at_their_offsets(tokenizer, echo, stop):
    whole, prompt = tokenizer.encode(PROMPT + " Paris, and the sky"), tokenizer.encode(PROMPT)
    choice = answered(tokenizer, whole[len(prompt) :], stop, echo=echo)
    text = tokenizer.decode(whole)[len(tokenizer.decode(prompt)) :]
    text = text[: text.index(stop[0])] if stop else text
    assert choice["text"] == (PROMPT if echo else "") + text
    table = choice["logprobs"]
    for name, at in zip(table["tokens"], table["text_offset"], strict=True):
        assert at < len(choice["text"]), "entries end where the text does"
        beyond = at + len(name) > len(choice["text"])
        assert choice["text"].startswith((name, name.lstrip()), at) or beyond or name == "<s>"
