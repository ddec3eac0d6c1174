"""Text of completions is what transformers decodes prompt and completion together to, without the
prompt's text.
"""

import pytest
from transformers import PreTrainedTokenizerFast

from mint_jax.data.tokenizer import Tokenizer
from mint_jax.rollout.detokenize import HALF, Detokenizer, Stops, context_of, text_behind
from tests.data.tiny_tokenizers import byte_level, metaspace, save, sentence_piece

TEXTS = [
    "The capital of France is Paris, and the sky is blue.",
    "two plus two is four; it's été 日本 now",
    "say a colour",
]
KINDS = {"byte_level": byte_level, "llama": sentence_piece, "metaspace": metaspace}


@pytest.fixture(scope="module", params=KINDS)
def pair(request, tmp_path_factory):
    """A tokenizer of ours, and transformers' of the same file."""
    folder = save(tmp_path_factory.mktemp(request.param), KINDS[request.param]())
    return Tokenizer(folder), PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))


def wanted(theirs, prompt, tokens):
    """The oracle: None where the prompt's text is not the beginning of the whole, as after half a
    character.
    """

    def decoded(ids):
        return theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    known, whole = decoded(prompt), decoded([*prompt, *tokens])
    return whole[len(known) :] if whole.startswith(known) else None


def draw(rng, tokenizer, longest):
    """Random tokens, some of them of a text, so that there are whole characters among the
    halves.
    """
    ids = rng.integers(0, tokenizer.vocab_size, int(rng.integers(1, longest))).tolist()
    written = tokenizer.encode(
        "".join(rng.choice(list("ab é日😀.' "), int(rng.integers(1, 9))).tolist()), special=False
    )
    return [*ids, *written] if rng.random() < 0.5 else [*written, *ids]


def test_completions_are_what_transformers_decodes_behind_the_prompt(rng, pair):
    ours, theirs = pair
    compared = 0
    for _ in range(300):
        prompt = ours.encode(" ".join(rng.choice(TEXTS, int(rng.integers(1, 4))).tolist()))
        # bos alone, or half a character at the end, at times
        prompt = prompt[: int(rng.integers(1, len(prompt) + 1))]
        prompt += [ours.eos_id] * int(rng.integers(0, 20))  # decoded text leaves it out
        tokens = draw(rng, ours, 12)
        right = wanted(theirs, prompt, tokens)
        if right is None:
            continue
        compared += 1
        assert text_behind(ours.decode, context_of(ours.decode, prompt), tokens) == right, (
            prompt,
            tokens,
        )
        if HALF not in right:
            grown = Detokenizer(ours.decode, prompt)
            for count in sorted({*rng.integers(1, len(tokens) + 1, 4).tolist(), len(tokens)}):
                grown.settle(tokens[:count], grown.added(tokens[:count]))
                assert right.startswith(grown.text)
            assert grown.text + grown.added(tokens) == right
    assert compared > 200


def test_stop_strings_begin_with_the_blank_behind_the_prompt(rng, pair):
    ours, _ = pair
    whole = ours.encode("The capital of France is Paris and")
    begin = len(ours.encode("The capital of France is"))
    prompt, tokens = whole[:begin], whole[begin:]
    end, text = Stops(ours.decode, (" Paris",), prompt).look(tokens)
    assert text == ""
    assert text_behind(ours.decode, prompt, tokens[:end]) == " Paris"
    for _ in range(100):
        tokens = draw(rng, ours, 20)
        right = text_behind(ours.decode, prompt, tokens)
        if HALF in right or len(right) < 4:
            continue
        at = int(rng.integers(0, len(right) - 2))
        stop = right[at : at + int(rng.integers(1, 4))]
        looks, count, text = Stops(ours.decode, (stop,), prompt), 0, None
        while text is None:
            count = min(count + int(rng.integers(1, 4)), len(tokens))
            end, text = looks.look(tokens[:count])
        assert text == right[: right.index(stop)]
        assert end is not None
        assert stop in text_behind(ours.decode, prompt, tokens[:end])
        assert stop not in text_behind(ours.decode, prompt, tokens[: end - 1])
