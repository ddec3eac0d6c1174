"""The engine against transformers: greedy tokens, adapters, log-probabilities, stops, seeds,
groups, meshes, refusals.

Prompt lengths are fixed so that few programs are compiled; tokens and adapters are random.
"""

import dataclasses
import types

import numpy as np
import pytest
import torch
from scipy import special

from mint_jax.errors import UserError
from mint_jax.lora.tree import Slot
from mint_jax.models.paged import PAGE
from mint_jax.rollout.detokenize import context_of, text_behind
from mint_jax.rollout.engine import Engine
from mint_jax.rollout.request import Request
from tests import oracles
from tests.rollout.score_test import stacked_adapters, torch_logprobs

NEW = 12


def seed(rng) -> int:
    return int(rng.integers(2**31))


def prompts(rng, lengths) -> list[tuple[int, ...]]:
    return [tuple(rng.integers(0, 97, n).tolist()) for n in lengths]


def torch_greedy(model, prompt, new=NEW, **how) -> list[int]:
    tokens = torch.tensor([prompt])
    how |= {"max_new_tokens": new, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    found = model.generate(tokens, attention_mask=torch.ones_like(tokens), **how)
    return found[0, len(prompt) :].tolist()


def assert_greedy(mine, theirs, model, prompt, near=1e-4):
    """The same tokens, up to a place where torch itself has the two within ``near``: there float32
    may decide either way.
    """
    differ = next((i for i, (x, y) in enumerate(zip(mine, theirs)) if x != y), None)
    if differ is None:
        assert len(mine) == len(theirs)
        return
    logits_V = oracles.torch_logits(model, np.array([[*prompt, *theirs[:differ]]]))[0, -1]
    assert logits_V[theirs[differ]] - logits_V[mine[differ]] < near, (mine, theirs)


def test_completion_i_draws_from_a_hash_of_the_seed_and_i(rng, tiny_base):
    """The same in any company and for any n, and none that a neighbouring seed draws too."""
    [prompt] = prompts(rng, [10])
    seed = int(rng.integers(2**32 - 3))
    engine = Engine(tiny_base())
    asked = (3, seed), (4, seed), (3, seed + 1)
    [three], [four], [after] = (
        engine.generate([Request(prompt, n=n, max_tokens=NEW, seed=s)]) for n, s in asked
    )
    assert [c.tokens for c in three] == [c.tokens for c in four[:3]]
    assert len({tuple(c.tokens) for c in (*four, *after)}) == 7
    before, after = (Request(p, max_tokens=NEW, seed=1) for p in prompts(rng, [16, 1]))
    mine = Request(prompt, max_tokens=NEW, seed=seed)
    assert engine.generate([before, mine, after])[1][0].tokens == three[0].tokens


def test_stop_ids_end_a_row_and_are_kept(rng, tiny_base):
    engine = Engine(tiny_base())
    requests = [
        Request(p, max_tokens=NEW, seed=int(rng.integers(2**31))) for p in prompts(rng, (7, 12, 3))
    ]
    free = [c.tokens for [c] in engine.generate(requests)]
    stops = [(free[0][4], 96), (free[1][9], free[1][2], 500), ()]
    results = engine.generate([dataclasses.replace(r, stop_ids=s) for r, s in zip(requests, stops)])
    for tokens, ids, [c] in zip(free, stops, results, strict=True):
        first = next((i + 1 for i, token in enumerate(tokens) if token in ids), None)
        assert c.tokens == tokens[:first]
        assert len(c.logprobs) == len(c.tokens)
        assert c.finish == ("length" if first is None else "stop")


# also halves of characters
PIECES = [b"a", b"b", b"ab", b"bc", b" ", b"\xc3", b"\xa9", b"\xe6\x97", b"\xa5", b"c"]


def decode(ids) -> str:
    return b"".join(PIECES[i % len(PIECES)] for i in ids).decode(errors="replace")


def test_stop_strings_end_a_completion_with_the_token_that_completes_them(rng, tiny_base):
    """Against a search over all prefixes of the same seed's tokens without stops; 40 tokens: the
    host looks several times.
    """
    engine, stops = Engine(tiny_base(), decode), ("bca", " a")  # the second is inside the first
    how = {"max_tokens": 40, "temperature": 3.0}
    requests = [Request(p, seed=seed(rng), **how) for p in prompts(rng, (7, 12, 3, 5))]
    free = engine.generate(requests)
    results = engine.generate([dataclasses.replace(r, stop=stops) for r in requests])
    for request, [whole], [c] in zip(requests, free, results, strict=True):
        context = context_of(decode, request.prompt)
        texts = [text_behind(decode, context, whole.tokens[:n]) for n in range(1, 41)]
        assert whole.text == texts[-1]
        n = next((n for n, text in enumerate(texts, 1) if any(s in text for s in stops)), None)
        assert c.finish == ("length" if n is None else "stop")
        assert c.tokens == whole.tokens[:n]
        assert len(c.logprobs) == len(c.tokens)
        found = [texts[n - 1].find(s) for s in stops if s in texts[n - 1]] if n else [None]
        assert c.text == texts[-1 if n is None else n - 1][: min(found)]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"prompt": ()}, "the prompt is empty"),
        (
            {"prompt": (1,) * 200, "max_tokens": 57},
            "200 tokens and max_tokens 57 exceed the context",
        ),
        ({"prompt": (3, 97)}, "token id 97; this base has ids 0 to 96"),
        ({"stop": ("x",)}, r"stop strings \('x',\) need a tokenizer"),
        (
            {"prompt": (3, 4, 5), "target_prompt_logprobs": ((1,),)},
            "target_prompt_logprobs has 1 entries; a prompt of 3",
        ),
        ({"seed": 2**32}, "seed is 4294967296; expected 0 to"),
        ({"temperature": 1e31}, r"temperature is 1e\+31; expected 0 <= temperature <= 1e\+30"),
        ({"top_logprobs": 21}, "top_logprobs is 21; expected 0 to 20"),
        ({"logit_bias": ((97, 1.0),)}, "logit_bias has 1.0 for token 97; .*of the ids 0 to 96"),
        # no stack of rank 4, and two slots in that of rank 8
        ({"adapter": Slot(4, 0)}, "is not resident"),
        ({"adapter": Slot(8, 2)}, "is not resident"),
    ],
)
def test_bad_requests_are_refused_before_any_runs(rng, tiny_base, bad, message):
    """With ``top_p`` 0 or ``min_p`` over 1 no token is left to draw from; a negative temperature or
    top_k means nothing.
    """
    seen, base = [], tiny_base()
    _, stacks, _ = stacked_adapters(rng, base.cfg)
    requests = [Request((1, 2, 3, 4), max_tokens=NEW), Request(**({"prompt": (1,)} | bad))]
    with pytest.raises(UserError, match=message):
        Engine(base).generate(requests, stacks, finished=seen.append)
    assert not seen


def test_a_stop_string_that_is_a_special_token_ends_a_completion_by_its_id(rng, tiny_base):
    """Decoded text leaves special tokens out: the string itself never matches."""
    [prompt] = prompts(rng, [7])
    request = Request(prompt, max_tokens=NEW, seed=int(rng.integers(2**31)))
    [[free]] = Engine(tiny_base()).generate([request])
    end = free.tokens[5]
    tokenizer = types.SimpleNamespace(special_ids={"<end>": end})
    base = dataclasses.replace(tiny_base(), tokenizer=tokenizer)
    engine = Engine(base, lambda ids: "".join(f"{i} " for i in ids if i != end))
    [[found]] = engine.generate([dataclasses.replace(request, stop=("<end>", "no such text"))])
    assert found.tokens == free.tokens[: free.tokens.index(end) + 1]
    assert found.finish == "stop"
    assert "<end>" not in found.text
    message = r"'<end>!' contains the special token '<end>'.*can never match: use '<end>' alone"
    with pytest.raises(UserError, match=message):
        engine.generate([dataclasses.replace(request, stop=("<end>!",))])


def penalised_greedy(model, request: Request, new: int) -> list[int]:
    """Greedy decoding by transformers' logits, with biases and penalties in float64 as their
    definitions say.
    """
    tokens: list[int] = []
    again = request.repetition_penalty
    for _ in range(new):
        z = oracles.torch_logits(model, np.array([[*request.prompt, *tokens]]))[0, -1]
        z = z.astype(np.float64)
        for token, bias in request.logit_bias:
            z[token] += bias
        for token in {*request.prompt, *tokens}:
            z[token] = z[token] / again if z[token] > 0 else z[token] * again
        for token in set(tokens):
            z[token] -= request.frequency_penalty * tokens.count(token) + request.presence_penalty
        tokens.append(int(z.argmax()))
    return tokens


PENALTIES = [
    {"repetition_penalty": 1.7},
    {"frequency_penalty": 0.8},
    {"presence_penalty": 2.5},
    {"logit_bias": ((5, 3.0), (90, -2.0), (17, 100.0))},
    {"repetition_penalty": 1.3, "frequency_penalty": -0.6, "logit_bias": ((3, 1.5),)},
    {},
]


def test_penalties_and_biases_of_mixed_rows_are_those_of_their_definitions(rng, tiny_base, hf_dirs):
    """Rows with and without any in one batch; one alone against transformers' own decoding, which
    has only that one.
    """
    model = oracles.torch_model(hf_dirs("llama"), torch.float64)
    asked = [
        Request(p, temperature=0, max_tokens=NEW, **fields)
        for p, fields in zip(prompts(rng, (4, 16, 8, 1, 11, 8)), PENALTIES)
    ]
    results = Engine(tiny_base("llama")).generate(asked)
    changed = 0
    for request, [c] in zip(asked, results, strict=True):
        wanted = penalised_greedy(model, request, NEW)
        differ = next((i for i, (x, y) in enumerate(zip(c.tokens, wanted)) if x != y), NEW)
        # float32 may decide a tie, not the first half of a completion
        assert differ > NEW // 2 or c.tokens == wanted
        changed += c.tokens != torch_greedy(model, request.prompt)
        own = torch_logprobs(model, [*request.prompt, *c.tokens])[-NEW:]  # of the model itself
        np.testing.assert_allclose(c.logprobs, own, atol=3e-5)
    assert changed >= 4, "they must matter"
    theirs = torch_greedy(model, asked[0].prompt, repetition_penalty=1.7)
    assert theirs == penalised_greedy(model, asked[0], NEW)


def model_logprobs(model, tokens) -> np.ndarray:
    """Log-probabilities of every next token, ``[T - 1, V]`` float64."""
    logits_TV = oracles.torch_logits(model, np.array([tokens]))[0, :-1].astype(np.float64)
    return special.log_softmax(logits_TV, axis=-1)


def assert_likeliest(pairs, logp_V):
    """Float32 through 3 layers; logits are of size 5."""
    ids, logprobs = zip(*pairs)
    np.testing.assert_allclose(logprobs, np.sort(logp_V)[::-1][: len(ids)], atol=3e-5)
    np.testing.assert_allclose(logprobs, logp_V[list(ids)], atol=3e-5)


def test_the_likeliest_tokens_and_their_logprobs_are_transformers(rng, tiny_base, hf_dirs):
    """Rows that ask for some, for others and for none in one batch; the model's own
    log-probabilities, whatever draws.
    """
    model = oracles.torch_model(hf_dirs("llama"), torch.float64)
    wanted = (3, 0, 20)
    how = {"max_tokens": NEW, "temperature": 0.8, "top_k": 5, "presence_penalty": 1.0}
    asked = [
        Request(p, seed=i, top_logprobs=k, **how)
        for i, (p, k) in enumerate(zip(prompts(rng, (4, 16, 8)), wanted))
    ]
    engine = Engine(tiny_base("llama"))
    free = engine.generate([dataclasses.replace(request, top_logprobs=0) for request in asked])
    for request, [c], [plain] in zip(asked, engine.generate(asked), free, strict=True):
        assert dataclasses.replace(c, top_logprobs=None) == plain, "not one bit"
        if not request.top_logprobs:
            assert c.top_logprobs is None
            continue
        logp_TV = model_logprobs(model, [*request.prompt, *c.tokens])[len(request.prompt) - 1 :]
        for pairs, logp_V in zip(c.top_logprobs, logp_TV, strict=True):
            assert len({i for i, _ in pairs}) == request.top_logprobs
            assert_likeliest(pairs, logp_V)


def test_targets_at_a_prompts_places_are_scored_and_the_last_tokens_alone_where_asked(
    rng, tiny_base, hf_dirs
):
    base = tiny_base("llama")
    model, engine = oracles.torch_model(hf_dirs("llama"), torch.float64), Engine(base)
    for length, last in ((1, None), (40, None), (90, 3), (129, 64), (130, 0), (70, 1000)):
        [prompt] = prompts(rng, (length,))
        engine.generate([Request(prompt, max_tokens=1)])  # its blocks are in the cache, unscored
        targets = tuple(
            tuple(rng.integers(-1, base.cfg.vocab_size, rng.integers(0, 6)).tolist())
            for _ in prompt[1:]
        )
        how = {"prompt_logprobs_last_n": last, "target_prompt_logprobs": targets}
        how |= {"prompt_logprobs": True, "top_prompt_logprobs": 2}
        [[c]] = engine.generate([Request(prompt, max_tokens=2, **how)])
        first = 0 if last is None else max(0, length - 1 - last)
        assert c.reused == first // PAGE * PAGE, "what is not scored comes from the cache"
        logp_TV = model_logprobs(model, prompt)
        own = logp_TV[np.arange(length - 1), prompt[1:]]
        own[:first] = np.nan
        np.testing.assert_allclose(c.prompt_logprobs, own, atol=3e-5)  # as above
        counts = [len(top) for top in c.top_prompt_logprobs]
        assert counts == [0] * first + [2] * (length - 1 - first)
        for pairs, logp_V in zip(c.top_prompt_logprobs[first:], logp_TV[first:]):
            assert_likeliest(pairs, logp_V)
        for t, (told, ids) in enumerate(zip(c.target_prompt_logprobs, targets, strict=True)):
            wanted = [] if t < first else [0.0 if i < 0 else logp_TV[t, i] for i in ids]
            np.testing.assert_allclose(told, wanted, atol=3e-5)


def test_alternatives_at_a_prompts_places_are_drawn_from_the_model(rng, tiny_base, hf_dirs):
    model, engine = oracles.torch_model(hf_dirs("llama"), torch.float64), Engine(tiny_base("llama"))
    [prompt] = prompts(rng, (45,))
    logp_TV = model_logprobs(model, prompt)
    asked = [
        Request(prompt, max_tokens=1, prompt_alternatives=k, seed=seed)
        for seed, k in enumerate((20,) * 9 + (3,))
    ]
    told = [c.prompt_alternatives for [c] in engine.generate(asked)]
    pairs = np.array(told[:9])  # [9, T, 20, 2]
    drawn, logprobs = pairs[..., 0].astype(int), pairs[..., 1]
    np.testing.assert_allclose(logprobs, logp_TV[np.arange(44)[None, :, None], drawn], atol=3e-5)
    # The mean surprise of the draws is the entropy: 7,920 of them, so a wrong temperature or shared
    # noise is far outside 5 sigma.
    entropy = -(np.exp(logp_TV) * logp_TV).sum(-1)
    spread = (np.exp(logp_TV) * logp_TV**2).sum(-1) - entropy**2
    off = (-logprobs.mean((0, 2)) - entropy).sum() / np.sqrt((spread / 180).sum())
    assert abs(off) < 5
    # no two places draw alike
    assert len({tuple(x) for x in drawn.reshape(-1, 20).tolist()}) == 9 * 44
    [[alone]] = engine.generate([asked[9]])
    assert alone.prompt_alternatives == told[9]
    assert {len(place) for place in told[9]} == {3}
