"""The decoder against transformers: logits, gradients, packed rows, caches; and meshes against one
device.

Axes: B rows, T tokens, V vocab, P prompt tokens, L layers, R rank.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from mint_jax.models import attention, hf, transformer
from mint_jax.models import base as base_lib
from mint_jax.models.attention import Segments
from mint_jax.models.transformer import DecoderInputs, hidden_states
from mint_jax.rollout.engine import Engine
from mint_jax.rollout.request import Request
from tests import oracles
from tests.exchange import decoder_logits, looser
from tests.marks import first
from tests.models.paged_test import continued

LATENT = [("deepseek_v3_dense", "names"), ("deepseek_v3_yarn_dense", "full")]
LATENT.append(("moonlight_dense", "none"))
INDEXED = [("deepseek_v32_dense", "none"), ("glm_dense", "names"), ("glm_dense", "full")]
GEMMA4 = [("gemma4", "names"), ("gemma4_shared", "full"), ("gemma4_shared", "none")]
GEMMA4 = [pytest.param(*case, marks=pytest.mark.long) for case in GEMMA4]
# beyond the original context of llama3 (32) and yarn (64), beyond two blocks of attention
LENGTHS = (150, 37, 1)


def _arange(shape):
    return np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape)


def _padded(rng, vocab, lengths=LENGTHS):
    """Right-padded rows; what stands in the padding must not matter."""
    return rng.integers(3, vocab, size=(len(lengths), max(lengths))).astype(np.int32)


def _drawn(draw, rows_of, model, cfg):
    """Tokens by ``draw()`` of which all rows, ``rows_of(tokens)``, depend on no choice of keys or
    experts that float32 may make either way.
    """
    for _ in range(200):
        tokens = draw()
        rows = rows_of(tokens) if cfg.indexer or cfg.routed else []
        if all(oracles.decided(model, row.tolist()) == len(row) for row in rows):
            return tokens
    raise AssertionError("scores are ties throughout")


def _row_by_row(tokens_BT, lengths=LENGTHS):
    return [row[:n] for row, n in zip(tokens_BT, lengths)]


@pytest.mark.parametrize("name", [n for n in oracles.TINY if n not in ("deepseek_v32", "glm")])
def test_logits_equal_transformers(name, hf_dirs, tiny_base, rng):
    base, model = tiny_base(name), oracles.torch_model(hf_dirs(name))
    tokens_BT = _drawn(lambda: _padded(rng, base.cfg.vocab_size), _row_by_row, model, base.cfg)
    ours_BTV = np.asarray(decoder_logits(base.params, None, tokens_BT, cfg=base.cfg))
    for ours, row in zip(ours_BTV, _row_by_row(tokens_BT)):
        theirs = oracles.torch_logits(model, row[None])[0]
        # float32 sums in another order, logits of size 3; with states up to 1.2e-3 in 150 draws
        atol = 2e-4 * looser(base.cfg, 10.0)
        np.testing.assert_allclose(ours[: len(theirs)], theirs, atol=atol)


@pytest.fixture(scope="module")
def torch_smollm2(smollm2):
    return oracles.torch_model(smollm2.directory)


ANSWERS = {
    "What is the capital of France?": "The capital of France is Paris.",
    "What is 2 + 3?": "2 + 3 = 5",
    "Name three colors.": "1. Red\n2. Blue\n3. Green",
}


@pytest.mark.long
def test_smollm2_answers_as_under_transformers(smollm2, torch_smollm2):
    """Greedy decoding of chat prompts, all in one batch: the tokens of ``generate`` on each prompt
    alone.
    """
    tokenizer = smollm2.tokenizer
    chats = ([{"role": "user", "content": question}] for question in ANSWERS)
    prompts = [tuple(tokenizer.encode_chat(chat)) for chat in chats]
    how = {"max_tokens": 20, "temperature": 0.0, "stop_ids": tokenizer.eos_ids}
    requests = [Request(prompt, **how) for prompt in prompts]
    results = Engine(smollm2, tokenizer.decode).generate(requests)
    for prompt, (completion,), answer in zip(prompts, results, ANSWERS.values(), strict=True):
        whole = torch_smollm2.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False)
        theirs = whole[0, len(prompt) :].tolist()
        assert completion.tokens == theirs
        assert completion.text == answer
        assert completion.finish == "stop"
        logits = oracles.torch_logits(torch_smollm2, np.array([[*prompt, *theirs]]))[0]
        logp_TV = torch.log_softmax(torch.tensor(logits), dim=-1)
        want = logp_TV[len(prompt) - 1 : -1].gather(1, torch.tensor(theirs)[:, None])[:, 0]
        np.testing.assert_allclose(completion.logprobs, want, atol=2e-4)  # as the logits


@pytest.mark.parametrize("name", ["llama", "qwen3", "deepseek_v3_dense"])
def test_bfloat16_is_as_near_to_float32_as_transformers_is(name, hf_dirs, mesh, rng):
    base = base_lib.load(str(hf_dirs(name)), mesh, "bfloat16")
    assert base.dtype == jnp.bfloat16
    tokens_BT = _padded(rng, base.cfg.vocab_size, lengths=(150, 150))
    ours = np.asarray(decoder_logits(base.params, None, tokens_BT, cfg=base.cfg))
    theirs, exact = (
        oracles.torch_logits(oracles.torch_model(hf_dirs(name), t), tokens_BT)
        for t in (torch.bfloat16, torch.float32)
    )

    def rms(x):
        return np.sqrt(np.mean(x**2))

    noise = rms(theirs - exact)
    assert 0 < rms(ours - exact) < 1.2 * noise  # ours rounds no more often than torch does
    assert rms(ours - theirs) < 2 * noise  # two independent roundings differ by sqrt(2) of one
    # The largest of 29,100 differences is a matter of luck (4 % to 5 % of the largest logit here):
    # it is held to torch's own largest.
    assert np.abs(ours - exact).max() < 3 * np.abs(theirs - exact).max()


@functools.partial(jax.jit, static_argnames=("cfg", "remat"))
def _gradients(params, tokens_BT, positions_BT, segments, g_BTV, *, cfg, remat="none"):
    """Gradient of the sum of ``logits * g`` with respect to every parameter, and the logits."""

    def loss(params):
        out_BTV = decoder_logits(
            params, None, tokens_BT, positions_BT, segments, cfg=cfg, remat=remat
        )
        return jnp.sum(out_BTV * g_BTV), out_BTV

    return jax.grad(loss, has_aux=True)(params)


_FACTOR = ".layer_scalar"  # a buffer of each layer


def _grads_under_torch(directory, rows, cotangents):
    """Gradient of the sum over rows of ``logits * cotangent``, by the parameters' names."""
    model = oracles.torch_model(directory)
    factors = {
        name: buffer.requires_grad_()
        for name, buffer in model.named_buffers()
        if name.endswith(_FACTOR)
    }
    for row, g in zip(rows, cotangents):
        logits = model(torch.tensor(np.asarray(row)[None], dtype=torch.long)).logits[0]
        (logits * torch.tensor(g)).sum().backward()
    named = (*model.named_parameters(), *factors.items())
    # the choice of keys has no gradient
    return {n: np.zeros(p.shape) if ".indexer." in n else p.grad.numpy() for n, p in named}


def _assert_same_gradients(tree, theirs, cfg):
    ours = dict(hf.tensors(tree, cfg))
    assert set(ours) == set(theirs)
    # The norm after the last layer removes its factor but for epsilon: rounding is of the others'.
    factors = [np.abs(want).max() for name, want in theirs.items() if name.endswith(_FACTOR)]
    # Scores without the factor head_dim ** -0.5 round that much more coarsely.
    coarser = cfg.head_dim**0.5 * (cfg.score_scale or 0)
    rounding = 1e-4 * max(1.0, coarser) * looser(cfg)
    for name, want in theirs.items():
        # float32 sums over tokens
        top = max(factors) if name.endswith(_FACTOR) else np.abs(want).max()
        np.testing.assert_allclose(ours[name], want, atol=rounding * top, err_msg=name)


@pytest.mark.parametrize(
    ("name", "remat"),
    [("qwen3", remat) for remat in transformer.REMAT]
    + [("llama_bias", "none"), ("qwen3_5", "names"), ("gemma3", "names"), *GEMMA4, *LATENT]
    + INDEXED
    + [
        pytest.param(name, "names", marks=pytest.mark.long)
        for name in ("nemotron_h_dense", "kimi_linear_dense")
    ],
)
def test_gradients_equal_torch_under_every_remat_policy(
    name, remat, hf_dirs, tiny_base, rng, monkeypatch
):
    """With and without slices of a block's scores."""
    base, lengths = tiny_base(name), (70, 70)
    if remat == "names":  # 2 rows of 4 heads have 72 KB of scores in a block
        monkeypatch.setattr(attention, "SCORE_BYTES", 20_000)
    tokens_BT = _drawn(
        lambda: _padded(rng, base.cfg.vocab_size, lengths),
        list,
        oracles.torch_model(hf_dirs(name)),
        base.cfg,
    )
    g_BTV = rng.normal(size=(*tokens_BT.shape, base.cfg.vocab_size)).astype(np.float32)

    grads, _ = _gradients(
        base.params, tokens_BT, _arange(tokens_BT.shape), None, g_BTV, cfg=base.cfg, remat=remat
    )
    _assert_same_gradients(grads, _grads_under_torch(hf_dirs(name), tokens_BT, g_BTV), base.cfg)


@pytest.mark.parametrize(
    "name",
    first(
        6,
        ["qwen3", "deepseek_v3_dense", "qwen3_5", "gemma3", "deepseek_v32_dense", "glm_dense"]
        + ["nemotron_h_dense", "gemma4_shared", "kimi_linear_dense"],
    ),
)
def test_a_packed_row_equals_its_rows_apart(name, hf_dirs, tiny_base, rng):
    """A prompt, three rollouts that see it, an unrelated text, and padding, all in one row."""
    base, model = tiny_base(name), oracles.torch_model(hf_dirs(name))
    V = base.cfg.vocab_size
    P, rollouts, other, padding = 20, (15, 30, 1), 12, 6
    lengths = (P, *rollouts, other, padding)

    def alone(pieces):
        """Returns rows of each piece: the rollouts after their prompt."""
        return [np.concatenate([*pieces[: 0 < i < 4], pieces[i]]) for i in range(5)]

    pieces = _drawn(
        lambda: [rng.integers(V, size=n).astype(np.int32) for n in lengths], alone, model, base.cfg
    )
    own = np.repeat(np.arange(len(pieces)), lengths)[None].astype(np.int32)
    parent = np.where((own >= 1) & (own <= 3), 0, own)
    starts = [0, P, P, P, 0, 0]
    positions = [s + np.arange(len(p)) for s, p in zip(starts, pieces)]
    positions = np.concatenate(positions)[None].astype(np.int32)
    tokens = np.concatenate(pieces)[None]
    g_BTV = rng.normal(size=(*tokens.shape, V)).astype(np.float32) * (own < 5)[..., None]
    grads, (ours_TV,) = _gradients(
        base.params, tokens, positions, Segments(own, parent), g_BTV, cfg=base.cfg
    )
    rows, cotangents = alone(pieces), []
    for i, row in enumerate(rows):
        mine, before = own[0] == i, len(row) - lengths[i]
        cotangents.append(np.concatenate([np.zeros((before, V), np.float32), g_BTV[0, mine]]))
        (theirs,) = oracles.torch_logits(model, row[None])
        # float32 sums in another order
        atol = 2e-4 * looser(base.cfg, 5.0)
        np.testing.assert_allclose(ours_TV[mine], theirs[before:], atol=atol)
    _assert_same_gradients(grads, _grads_under_torch(hf_dirs(name), rows, cotangents), base.cfg)


@pytest.mark.parametrize(
    "name",
    first(
        5,
        ["llama_llama3", "qwen3_moe", "gpt_oss", "mistral", "deepseek_v32_dense", "glm_dense"]
        + ["deepseek_v3", "qwen3", "moonlight"],
    ),
)
def test_decoding_with_a_cache_equals_the_full_forward(name, hf_dirs, tiny_base, rng):
    """Two prompts, prefilled in two calls, and two rows of each: three in teams, one that reads its
    prompt itself.
    """
    base, model = tiny_base(name), oracles.torch_model(hf_dirs(name))
    lengths, G, new, routes = (140, 23), 2, 4, base.cfg.routed

    def draw():
        pieces = (rng.integers(3, base.cfg.vocab_size, n) for n in (*lengths, 2 * G * new))
        *prompts, tokens = (piece.astype(np.int32) for piece in pieces)
        return prompts, tokens.reshape(2 * G, new)

    def rows_of(drawn):
        prompts, new_BT = drawn
        return [np.concatenate([prompts[i // G], new_BT[i]]) for i in range(2 * G)]

    prompts, new_BT = drawn = _drawn(draw, rows_of, model, base.cfg)
    rows = rows_of(drawn)
    theirs = [oracles.torch_logits(model, row[None])[0] for row in rows]
    of_row = np.arange(2 * G) // G
    ours = continued(rng, base.params, base.cfg, prompts, of_row, new_BT, alone=(1,), routes=routes)
    for i, want in enumerate(theirs):
        n = lengths[i // G]
        # float32 sums in another order, as above
        np.testing.assert_allclose(ours.first[i // G], want[:n], atol=2e-4)
        np.testing.assert_allclose(ours.rest[i], want[n:], atol=2e-4)
    if base.cfg.indexer:
        for i in range(2 * G):
            page, at = ours.layout.where(i, new).T
            written = np.any(ours.pool["dense"]["index"][:, page, at], axis=(1, 2))
            assert written.tolist() == list(base.cfg.indexer.full), "others have no keys"
    if routes:
        recorded = ours.pool["routes"]["moe"]
        assert recorded.dtype == np.uint8
        for i, row in enumerate(rows):
            page, at = ours.layout.where(i, new).T
            wanted = _routes(base.params, row[None], cfg=base.cfg)[:, 0]
            same = np.sort(recorded[:, page, at]) == np.sort(wanted)
            assert np.mean(same) > 0.99  # two experts may be as good as each other to float32


@functools.partial(jax.jit, static_argnames="cfg")
def _routes(params, tokens_BT, *, cfg):
    return hidden_states(
        params, None, DecoderInputs(tokens_BT, _arange(tokens_BT.shape)), cfg, keep_routes=True
    )[1]["moe"]["routes"]
