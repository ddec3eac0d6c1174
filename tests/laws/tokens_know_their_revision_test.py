"""Law 7 (with 5 and 12): every sampled token of a job names the revision that drew it, and what
that revision is called may move on.
"""

import contextlib
import threading

import chex
import jax
import numpy as np
import pytest

from mint_jax import mesh
from mint_jax.catalog.lifecycle import Catalog
from mint_jax.catalog.packed import unpack
from mint_jax.catalog.rollouts import unpack_rollouts
from mint_jax.harness import adapters, recorder
from mint_jax.harness.adapters import JobCatalog
from mint_jax.lora import tree as lora_tree
from mint_jax.models import base as base_lib
from mint_jax.models import transformer
from mint_jax.recipes import grpo
from mint_jax.rollout.engine import Engine
from mint_jax.rollout.request import Request
from mint_jax.rollout.score import Scorer
from tests.configs import only, read, run_config, tiny
from tests.groups import rows_of, write_environment

ATOL = 1e-4  # float32: a scorer's batch has another shape than the sampler's


@pytest.fixture
def run_job(tmp_path, one_device, monkeypatch):
    """Runs two steps of GRPO into one catalog; ``(workdir, policies, changes of a policy) ->
    config``.
    """
    digest_of = recorder.digest_of

    def off_the_loop(data):  # the job's thread goes on with the version
        assert threading.current_thread() is not threading.main_thread()
        return digest_of(data)

    monkeypatch.setattr(recorder, "digest_of", off_the_loop)
    write_environment(tmp_path, monkeypatch)

    def run(workdir, names, tenant="default", settings=None, **changes):
        config = only(tiny("grpo"), *names)
        config.update({"steps": 2, "export_every": 1, "tensorboard": False, "tenant": tenant})
        config.catalog = str(tmp_path / "catalog")
        with config.unlocked():
            config.update(settings or {})
        for policy in config.policies.values():
            policy.unlock()
            policy.env = {"name": "varied:make"}
            policy.optimizer.learning_rate = 0.1
            policy.update(changes)
        run_config(config, tmp_path / workdir)
        return config

    return run


def records(catalog, policy):
    """Step -> rollout object."""
    found = catalog.rollouts(policy)
    return {one.step: unpack_rollouts(catalog.load_payload(one.digest)) for one in found}


def scores(base, catalog, digest, rollouts):
    """Log-probabilities of the sampled tokens under a revision, end to end."""
    adapter, schema = unpack(catalog.load(digest))
    named = {"r": (schema.config, adapter)}
    stacks, slots = lora_tree.stack_adapters(transformer.abstract(base.cfg), named)
    groups = zip(rollouts.prompts, rollouts.tokens)
    texts = [(len(prompt), prompt + row) for prompt, group in groups for row in group]
    found = Scorer(base).logprobs([text for _, text in texts], [slots["r"]] * len(texts), stacks)
    return np.concatenate([values[length - 1 :] for values, (length, _) in zip(found, texts)])


def flat(nested):
    """Rows of all groups."""
    return [row for group in nested for row in group]


@pytest.mark.long
def test_every_sampled_token_names_the_revision_that_drew_it(run_job, tmp_path):
    run_job("on", ("ppo", "cispo"))
    config = run_job("off", ("ppo",), tenant="off", rollout_revision="ppo@1")
    base = base_lib.load("tiny-random", mesh.make_mesh({"data": 1}))
    with Catalog.open(tmp_path / "catalog") as catalog:
        for policy in ("ppo", "cispo"):
            by_step = {revision.step: revision.digest for revision in catalog.revisions(policy)}
            kept = records(catalog, policy)
            assert sorted(kept) == [0, 1]
            for step, rollouts in kept.items():
                rows = flat(rollouts.revisions)
                digests = set(flat(rows))
                assert len(digests) == 1
                assert list(map(len, rows)) == list(map(len, flat(rollouts.tokens)))
                assert (digests == {by_step[1]}) == (step == 1)
            sampled = np.concatenate(flat(kept[1].logprobs))
            before, after = (scores(base, catalog, by_step[n], kept[1]) for n in (1, 2))
            np.testing.assert_allclose(before, sampled, atol=ATOL)
            assert np.abs(after - sampled).max() > 10 * ATOL, "the policy did not move"

        # off-policy: both steps are drawn from ppo@1, with its logprobs, while another policy
        # trains on them
        digest = catalog.resolve("ppo@1").digest
        kept = records(catalog, "off/ppo")
        assert sorted(kept) == [0, 1]
        moved = [revision.digest for revision in catalog.revisions("off/ppo")]
        assert len({digest, *moved}) == 3
        for rollouts in kept.values():
            assert set(flat(flat(rollouts.revisions))) == {digest}
            sampled = np.concatenate(flat(rollouts.logprobs))
            np.testing.assert_allclose(scores(base, catalog, digest, rollouts), sampled, atol=ATOL)
        # importance weights come from the revision that drew the tokens
        assert all(row["max_gap"] > 10 * ATOL for row in rows_of(tmp_path / "off"))

    with contextlib.closing(JobCatalog(tmp_path / "catalog")) as jobs:
        loaded = adapters.read_adapter(digest, base, jobs)
        job = grpo.ConcurrentGrpo(read(config), base)
        with job.sampling_from({"ppo": digest}, jobs, str):
            check_fixed(job, base, loaded, digest, kept)


@pytest.mark.long
def test_each_part_of_a_completion_is_its_revisions(run_job, tmp_path, monkeypatch):
    """Oracle: the scorer's pass over the whole completion under each of the revisions. The parts of
    two steps are drawn in one call.
    """
    calls, generate = [], grpo.PolicySampler.sample
    note = lambda self, rows, *how: (rows and calls.append(rows), generate(self, rows, *how))[1]  # noqa: E731
    monkeypatch.setattr(grpo.PolicySampler, "sample", note)
    late = {"max_staleness": 1, "partial_rollouts": True, "steps": 4}
    how = {"sampling": {"prompts": 2, "group_size": 2, "max_tokens": 7}}
    run_job("parts", ("ppo",), settings=late, **how)
    assert len(calls) == 2 + 4 + 1  # evaluations, rollouts, the last part of the last step
    base = base_lib.load("tiny-random", mesh.make_mesh({"data": 1}))
    with Catalog.open(tmp_path / "catalog") as catalog:
        by_step = {revision.step: revision.digest for revision in catalog.revisions("ppo")}
        kept = records(catalog, "ppo")
        for step in (2, 3):
            rows, sampled = flat(kept[step].revisions), np.concatenate(flat(kept[step].logprobs))
            older, newer = by_step[step - 1], by_step[step]
            assert all(row == [older] * 4 + [newer] * (len(row) - 4) for row in rows)
            drawers = np.concatenate(rows)
            for digest in (older, newer):
                own = np.abs(scores(base, catalog, digest, kept[step]) - sampled)
                assert own[drawers == digest].max() < ATOL
                assert own[drawers != digest].max() > 10 * ATOL


def check_fixed(job, base, loaded, digest, kept):
    """A job's rollouts of a fixed revision are those that the revision alone samples."""
    named = {"r": (loaded.config, loaded.adapter)}
    stacks, slots = lora_tree.stack_adapters(transformer.abstract(base.cfg), named)
    engine, member = Engine(base, base.need_tokenizer().decode), job.members["ppo"]
    for step, rollouts in kept.items():
        how = {"adapter": slots["r"], "n": member.sampling.group_size, "stop_ids": job.stop_ids}
        how |= member.sampling.drawing
        drawn = job._draw("ppo", step, None)
        asked = [Request(prompt=tuple(member.train[i]), seed=seed, **how) for i, seed in drawn]
        alone = [[c.tokens for c in group] for group in engine.generate(asked, stacks)]
        assert rollouts.tokens == alone, "as sampled from that revision alone"
        before = jax.tree.map(np.array, job.trainer.state)
        sampled = job.rollout(["ppo"], step)["ppo"]
        assert [[c.tokens for c in group] for group in sampled.completions] == alone
        assert sampled.drawn_by == [[digest]] * len(sampled.prompts)
        chex.assert_trees_all_equal(job.trainer.state, before)
