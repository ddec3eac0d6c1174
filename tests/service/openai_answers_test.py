"""Answers over tokenizers of several kinds: texts that continue the prompt, and log-probabilities
that stand where their tokens do.
"""

import pytest

from mint_jax.data.tokenizer import Tokenizer
from mint_jax.rollout.detokenize import HALF, context_of, text_behind
from mint_jax.rollout.request import Completion
from mint_jax.rollout.stops import Stops
from mint_jax.rollout.stream import Piece
from mint_jax.service.growing import TokenTexts
from mint_jax.service.openai_answers import Answer
from mint_jax.service.openai_types import CompletionBody, completion_of
from mint_jax.service.validation import check
from mint_jax.service.weights import Model
from tests.data.tiny_tokenizers import save
from tests.rollout.detokenize_test import KINDS, TEXTS

PROMPT = "The capital of France is"


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request, tmp_path_factory):
    return Tokenizer(save(tmp_path_factory.mktemp(request.param), KINDS[request.param]()))


def completion(tokenizer, prompt, tokens, stop=()):
    """What the engine makes of tokens that were drawn."""
    end, text = Stops(tokenizer.decode, stop, prompt).look(tokens) if stop else (None, None)
    tokens = tokens[:end]
    text = (
        text_behind(tokenizer.decode, context_of(tokenizer.decode, prompt), tokens)
        if text is None
        else text
    )
    numbers = [-float(i) for i in range(len(tokens))]
    scores = [-0.5] * (len(prompt) - 1)
    return Completion(
        tokens, numbers, numbers, "length" if end is None else "stop", text, prompt_logprobs=scores
    )


def answered(tokenizer, done, **body):
    """One choice, whole, and the chunks of the same as a stream, token by token."""
    read = {
        stream: completion_of(
            check(CompletionBody, {"model": "m", "prompt": PROMPT, "stream": stream, **body}),
            tokenizer,
        )
        for stream in (False, True)
    }
    of = {
        stream: Answer(asked, Model("m"), TokenTexts(tokenizer), tokenizer.decode)
        for stream, asked in read.items()
    }
    pieces = [Piece(0, [token], [p]) for token, p in zip(done.tokens, done.logprobs, strict=True)]
    chunks = [chunk for piece in pieces for chunk in of[True].chunks([(0, piece)])] + of[
        True
    ].last_chunks(0, [done])
    return of[False].whole([[done]])["choices"][0], [chunk["choices"][0] for chunk in chunks]


@pytest.mark.parametrize("body", [{}, {"echo": True}, {"stop": [" Paris"]}, {"stop": ["is, and"]}])
def test_texts_join_and_every_token_stands_where_it_is_told(tokenizer, body):
    whole = tokenizer.encode(PROMPT + " Paris, and the sky")
    prompt = tokenizer.encode(PROMPT)
    done = completion(tokenizer, prompt, whole[len(prompt) :], tuple(body.get("stop", ())))
    choice, chunks = answered(tokenizer, done, logprobs=0, **body)
    text = tokenizer.decode(whole)[len(tokenizer.decode(prompt)) :]
    ended = text[: min([text.index(stop) for stop in body.get("stop", [])] or [len(text)])]
    assert choice["text"] == ("" if "echo" not in body else PROMPT) + ended
    assert "".join(chunk["text"] for chunk in chunks) == choice["text"]
    table = choice["logprobs"]
    told = list(zip(table["tokens"], table["text_offset"], strict=True))
    for name, at in told:
        assert (
            choice["text"].startswith((name, name.lstrip()), at)
            or at + len(name) > len(choice["text"])
            or name == "<s>"
        ), (name, at)
    assert all(at < len(choice["text"]) for _, at in told), "they end where the text does"
    joined = [chunk["logprobs"] for chunk in chunks]
    assert [p for part in joined for p in part["token_logprobs"]] == table["token_logprobs"]
    assert [at for part in joined for at in part["text_offset"]] == table["text_offset"]
    if not body:
        assert "".join(table["tokens"]) == choice["text"]


def test_random_tokens_are_told_the_same_streamed_or_not(rng, tokenizer):
    prompt = tokenizer.encode(PROMPT)
    for _ in range(60):
        tokens = tokenizer.encode(
            " ".join(rng.choice([*TEXTS, "日本", "😀 é", "a"], int(rng.integers(1, 4))).tolist()),
            special=False,
        )
        tokens = tokens[: int(rng.integers(1, len(tokens) + 1))]
        right = text_behind(tokenizer.decode, prompt, tokens)
        at = int(rng.integers(0, len(right) + 1))
        stop = (
            (right[at : at + 3],)
            if at < len(right) and rng.random() < 0.5 and HALF not in right
            else ()
        )
        done = completion(tokenizer, prompt, tokens, stop)
        choice, chunks = answered(tokenizer, done, logprobs=0, stop=list(stop))
        if HALF not in right:  # see Growing
            assert "".join(chunk["text"] for chunk in chunks) == choice["text"] == done.text
        assert [p for chunk in chunks for p in chunk["logprobs"]["token_logprobs"]] == choice[
            "logprobs"
        ]["token_logprobs"]
        assert [at for chunk in chunks for at in chunk["logprobs"]["text_offset"]] == choice[
            "logprobs"
        ]["text_offset"]
