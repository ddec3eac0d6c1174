"""The sampling program: cached decoding against torch, its limits, and its independence of padding and of pieces.

Axes: Q prompts, G rollouts of a prompt, B = Q G rows, T prompt tokens, C new tokens.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from mint_jax.rollout import generate
from mint_jax.rollout.generate import Limits
from mint_jax.rollout.sample import SamplingParams
from tests import oracles
from tests.rollout.score_test import torch_logprobs

LENGTHS, G, T, C = np.array([1, 16, 7], np.int32), 2, 16, 10
B = len(LENGTHS) * G


def settings(rng, temperature=1.0) -> SamplingParams:
    flat = [np.full(B, x, t) for x, t in ((temperature, np.float32), (0, np.int32), (1, np.float32), (0, np.float32))]
    return SamplingParams(*flat, rng.integers(0, 2**32, B, dtype=np.uint32))


def limits(max_tokens=C, stop_ids=((-1, -1),) * B) -> Limits:
    return Limits(np.broadcast_to(np.int32(max_tokens), B), np.array(stop_ids, np.int32))


def run(base, prompts_QT, sampling, limits, steps=C):
    """Prefill, then decoding in pieces of ``steps`` until every row is done."""
    args = base.params, None
    with jax.set_mesh(base.mesh):
        cache, state, _ = generate.prefill(*args, prompts_QT, LENGTHS, sampling, limits, cfg=base.cfg, rollouts=G, new_tokens=C)
        for _ in range(C):
            state = generate.decode(*args, cache, LENGTHS, state, sampling, limits, jnp.int32(steps), cfg=base.cfg)
            if state.done.all():
                break
    return jax.device_get(state)


@pytest.fixture
def prompts_QT(rng) -> np.ndarray:
    return rng.integers(0, 97, (len(LENGTHS), T)).astype(np.int32)  # what lies beyond a prompt's length is rubbish


@pytest.mark.parametrize("family", ["llama", "qwen3", "deepseek_v3_dense"])
def test_logprobs_of_rollouts_equal_a_torch_forward(rng, tiny_base, hf_dirs, prompts_QT, family):
    state = run(tiny_base(family), prompts_QT, settings(rng), limits())
    model = oracles.torch_model(hf_dirs(family), torch.float64)
    np.testing.assert_array_equal(state.lengths, C)
    for row in range(B):
        prompt = prompts_QT[row // G, : LENGTHS[row // G]].tolist()
        wanted = torch_logprobs(model, prompt + state.tokens[row].tolist())[-C:]
        np.testing.assert_allclose(state.logprobs[row], wanted, atol=3e-5)  # float32 through 3 layers; logits are of size 5
    assert (state.tokens[0] != state.tokens[1]).any(), "rollouts have seeds of their own"


def test_padding_of_prompts_changes_nothing(rng, tiny_base, prompts_QT):
    sampling = settings(rng)
    other = np.where(np.arange(T) < LENGTHS[:, None], prompts_QT, (prompts_QT + 1) % 97)
    one, two = (run(tiny_base(), p, sampling, limits()) for p in (prompts_QT, other))
    np.testing.assert_array_equal(one.tokens, two.tokens)
    np.testing.assert_array_equal(one.logprobs, two.logprobs)


@pytest.mark.parametrize("steps", [1, 4])
def test_decoding_in_pieces_gives_the_same_tokens(rng, tiny_base, prompts_QT, steps):
    sampling = settings(rng)
    whole, pieces = (run(tiny_base(), prompts_QT, sampling, limits(), steps=n) for n in (C, steps))
    np.testing.assert_array_equal(whole.tokens, pieces.tokens)
    np.testing.assert_array_equal(whole.logprobs, pieces.logprobs)


def test_each_row_ends_at_its_own_limit_or_stop_id(rng, tiny_base, prompts_QT):
    """Rows whose stop ids and lengths differ; the others' tokens stay those of a run without limits."""
    sampling = settings(rng)
    free = run(tiny_base(), prompts_QT, sampling, limits())
    stops = [(int(free.tokens[0, 3]), -1), (-1, -1), (int(free.tokens[2, 5]), int(free.tokens[2, 2])), (500, -1), (-1, -1), (-1, -1)]
    most = np.array([C, 4, C, 1, 0, C], np.int32)
    state = run(tiny_base(), prompts_QT, sampling, limits(most, stops))
    for row in range(B):
        tokens = free.tokens[row, : most[row]].tolist()
        first = next((i + 1 for i, token in enumerate(tokens) if token in stops[row]), None)
        n = len(tokens) if first is None else first
        assert state.lengths[row] == n
        assert state.stopped[row] == (first is not None)
        assert state.done[row]
        np.testing.assert_array_equal(state.tokens[row], np.pad(tokens[:n], (0, C - n)))
        np.testing.assert_array_equal(state.logprobs[row], np.pad(free.logprobs[row, :n], (0, C - n)))


def test_decoding_stops_when_all_rows_are_done(rng, tiny_base, prompts_QT):
    state = run(tiny_base(), prompts_QT, settings(rng), limits(np.array([3, 1, 2, 3, 0, 1])))
    assert state.step == 3
