"""Pages of layers with a window: what no window reaches is freed, so that longer contexts fit into
the same cache; prompts that begin alike go on where the pages of a window are left.
"""

import dataclasses

import jax
import numpy as np
import pytest

from mint_jax.models.paged import PAGE
from mint_jax.rollout import device, plans
from mint_jax.rollout.engine import Engine
from mint_jax.rollout.request import Request
from mint_jax.rollout.samples import pages_needed
from tests.rollout.company_test import assert_same, tokens
from tests.rollout.invariants import check_schedule
from tests.rollout.score_test import merged_models, torch_logprobs

LONG, NEW, ROWS, FURTHER = 1130, 40, 2, 16


def nbytes(tree) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(tree))


@pytest.mark.long
@pytest.mark.parametrize("family", ["gemma3", "gpt_oss"])
def test_long_contexts_fit_and_change_no_bit(rng, tiny_base, hf_dirs, family):
    base = tiny_base(family)
    cfg = base.cfg.replace(context=1280)
    base, routed = dataclasses.replace(base, cfg=cfg), cfg.routed
    near = plans.near_pages(cfg.windows.size, ROWS, 4)
    page = device.page_bytes(cfg, base.dtype, routed)
    far = device.page_bytes(cfg, base.dtype, routed, near=0)
    how = {"rows": (ROWS,), "keep_routes": routed, "cache_bytes": near * page + FURTHER * far}
    engine, cold = Engine(base, **how), Engine(base, **how, keep_cache=False)
    assert engine.calls.most == near + FURTHER

    begin = tokens(rng, LONG)
    prompts = begin, begin, (*begin[:700], *tokens(rng, 30)), (*begin[:100], *tokens(rng, 9))
    asked = [Request(p, max_tokens=NEW, seed=i) for i, p in enumerate(prompts)]
    assert pages_needed(asked[0]) > how["cache_bytes"] // page, "one page in every layer is more"
    alone = [cold.generate([request])[0] for request in asked]
    found = [engine.generate([request])[0] for request in asked]
    sizes = {
        kind: nbytes(device.part_of(engine.calls.pool, cfg, kind)) for kind in engine.calls.kinds
    }
    assert sizes == {"near": near * (page - far), "pages": (near + FURTHER) * far}
    # the last prompt's windows were evicted, and are written again
    wanted = [0, LONG // PAGE * PAGE, 700 // PAGE * PAGE, 0]
    assert [one.reused for [one] in found] == wanted
    found += engine.generate(asked[::-1])[::-1]
    for one, other in zip(found, [*alone, *alone], strict=True):
        assert_same(one[0], other[0])
    check_schedule(engine.active.schedule)
    model = merged_models(hf_dirs(family), cfg, {})[None]
    (one,) = alone[0]
    # float32 through 4 layers
    torch = torch_logprobs(model, [*begin, *one.tokens])[-NEW:]
    np.testing.assert_allclose(one.logprobs, torch, atol=1e-4)
