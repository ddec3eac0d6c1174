"""The engine on its attention kernels, interpreted: it samples and scores as by XLA, in teams and
alone.
"""

import dataclasses
from typing import Any

import numpy as np
import pytest

from mint_jax.models.config import Kernels
from mint_jax.rollout import device
from mint_jax.rollout.engine import Engine
from mint_jax.rollout.request import Request
from pallas_kernels.paged import pallas_gpu, pallas_tpu
from tests.rollout.company_test import random_stacks

OPS = {"llama": "paged_attention", "deepseek_v3_dense": "latent_attention"}


def on_kernel(base, family, kernel):
    cfg = base.cfg.replace(kernels=Kernels(**{OPS[family]: kernel}))
    return dataclasses.replace(base, cfg=cfg)


# pools as TPUs have them, or as wide as heads are
FORMS = {"pallas_tpu": (pallas_tpu, 128), "pallas_gpu": (pallas_gpu, 1)}


@pytest.mark.long
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", OPS)
def test_the_engine_gives_what_it_gives_by_xla(family, form, tiny_base, rng, monkeypatch):
    """Prompts of several runs and of less than one, samples that share one in a team, one alone,
    and a prompt that is scored.
    """
    asked, (kernels, lanes) = [], FORMS[form]
    attend = kernels.attend
    noted = lambda *args, **how: asked.append(args[0][0].shape) or attend(*args, **how)  # noqa: E731
    monkeypatch.setattr(kernels, "attend", noted)
    monkeypatch.setattr(device, "lanes", lambda mesh: lanes)
    base, drawn = tiny_base(family), []
    prompts = [tuple(rng.integers(3, base.cfg.vocab_size, n).tolist()) for n in (170, 40)]
    for kernel in ("xla", form):
        on = on_kernel(base, family, kernel)
        requests = [
            Request(prompts[0], max_tokens=3, temperature=0.0, n=3),
            Request(prompts[1], max_tokens=4, temperature=0.0, prompt_logprobs=True),
        ]
        drawn.append(Engine(on, max_rows=4).generate(requests, {}))
        assert bool(asked) == (kernel == form)
    for mine, theirs in zip(*drawn, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            assert one.tokens == other.tokens
            # float32, other orders of sums
            np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)
            if one.prompt_logprobs is not None:
                told = ([x or 0.0 for x in c.prompt_logprobs] for c in (one, other))
                np.testing.assert_allclose(*told, atol=1e-4)
    assert drawn[0][1][0].prompt_logprobs is not None
    assert len({shape[-2] for shape in asked}) == 3, "tokens of a row, of a team, of a block"


@pytest.mark.bits
def test_the_form_for_gpus_of_a_step_gives_the_same_bits(tiny_base, rng, monkeypatch):
    """It branches once before the layers: samples in a team, then samples alone."""
    base, prompt = tiny_base("llama"), tuple(rng.integers(3, 90, 140).tolist())
    asked: list[Any] = []
    once = device._once
    monkeypatch.setattr(device, "_once", lambda *args: asked.append(args) or once(*args))

    def drawn() -> list[Any]:
        device.decode.clear_cache()
        engine = Engine(base, max_rows=4)
        requests = [Request(prompt, max_tokens=3, n=n, seed=1) for n in (3, 1)]
        return [engine.generate([request], {}) for request in requests]

    usual = drawn()
    assert not asked
    with monkeypatch.context() as patch:
        patch.setattr(device.dispatch, "platform_of_mesh", lambda: "cuda")
        assert drawn() == usual
    assert asked
    device.decode.clear_cache()


@pytest.mark.long
@pytest.mark.bits
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", OPS)
def test_a_request_keeps_its_bits_beside_a_policy_that_is_nan(
    family, form, tiny_base, rng, monkeypatch
):
    """Its prompt is the neighbour's too, whose adapter has made other keys of it; and alone it
    reads in no team.
    """
    monkeypatch.setattr(device, "lanes", lambda mesh: FORMS[form][1])
    base = on_kernel(tiny_base(family), family, form)
    stacks, slots = random_stacks(rng, base.cfg)
    prompt = tuple(rng.integers(3, base.cfg.vocab_size, 140).tolist())
    mine = Request(prompt, slots["eight"], max_tokens=3, n=2, seed=5)
    beside = [
        Request(prompt, slots["nan"], max_tokens=3, seed=1, temperature=0.0),
        Request(prompt[:9], None, max_tokens=2, seed=2),
    ]
    engine = Engine(base, rows=(8,))
    [alone] = engine.generate([mine], stacks)
    together = engine.generate([beside[0], mine, beside[1]], stacks)
    assert [(c.tokens, c.logprobs) for c in together[1]] == [(c.tokens, c.logprobs) for c in alone]
    assert np.isfinite(alone[0].logprobs).all()
    assert not np.isfinite(together[0][0].logprobs).any()
