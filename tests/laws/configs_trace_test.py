"""Every config loads as ``launch`` loads it, is locked, builds into dataclasses, and its programs
trace at its own shapes.
"""

import functools
import re
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import launch as bench_launch
from mint_jax import mesh
from mint_jax import params as params_lib
from mint_jax.aot.programs import Plan
from mint_jax.data.buckets import ShapeBook
from mint_jax.data.tokenizer import Tokenizer
from mint_jax.errors import UserError
from mint_jax.harness import start
from mint_jax.models import base as base_lib
from mint_jax.models import hf_config, transformer
from mint_jax.models.base import DTYPES
from mint_jax.recipes import SETTINGS, dpo, grpo, sample, serve, sft
from mint_jax.rollout import device, plans
from mint_jax.rollout.engine import BLOCKS
from mint_jax.rollout.request import Request
from mint_jax.rollout.samples import longest_table
from mint_jax.train import state as state_lib
from mint_jax.train import step
from mint_jax.train.batch import Group, TrainSequence
from mint_jax.train.losses import stack_coefs
from tests.configs import load
from tests.groups import pack

ROOT = Path(__file__).parents[2]


def variants(path: Path) -> list[str]:
    """A config and its variants, as its docstring names them: ``configs/quickstart.py:ci``."""
    named = re.findall(rf"{path.name}:\w+", path.read_text())
    folder = path.parent.relative_to(ROOT)
    return [f"{folder}/{name}" for name in dict.fromkeys([path.name, *named])]


NAMES = [
    name
    for path in sorted((ROOT / "configs").rglob("*.py"))
    if path.parent.name not in ("bench", "sweeps")  # tests/benchmarks loads these
    for name in variants(path)
]
TRAINING = {"grpo", "sft", "dpo"}


@pytest.fixture(scope="session")
def pretrained(tmp_path_factory):
    """Another config's output as a base: what ``configs/bench/pretrain.py`` leaves, after one
    step.
    """
    config = bench_launch.load(str(ROOT / "configs" / "bench" / "pretrain.py:ci"))
    return bench_launch.run(config, tmp_path_factory.mktemp("pretrain"))["base"]


def abstract_base(config, pretrained):
    """The config's base with shapes in place of weights."""
    is_made = config.base == "runs/bench/pretrain/base"
    directory = Path(pretrained) if is_made else base_lib.resolve(config.base)
    cfg = hf_config.read_config(directory)
    params = params_lib.abstract(transformer.abstract(cfg, base_lib.DTYPES[config.dtype]))
    devices = mesh.make_mesh(vars(config.mesh), jax.devices()[:1])
    return base_lib.Base(config.base, directory, cfg, params, devices, Tokenizer(directory), "")


def training_groups(config, base):
    """Per policy the groups of its first step; sampled tokens are made up, at full length."""
    if config.job == "grpo":
        out = {}
        for name, m in grpo.members_of(config, base).items():
            columns = ([x] * m.sampling.max_tokens for x in (5, 1.0, 0.5, -1.0))
            sampled = [TrainSequence(*columns)] * m.sampling.group_size
            out[name] = [Group(prompt, sampled) for prompt in m.train[: m.sampling.prompts]]
        return out
    kind = {"sft": sft.SFT, "dpo": dpo.DPO}[config.job]
    made_up = [("row", Group([5] * 9, [TrainSequence([5] * 9, [1.0] * 9)]))] * 40
    data = {
        name: (made_up, made_up) if p.data.rollouts else sft.rows_of(p.data, kind)
        for name, p in config.policies.items()
    }
    students = sft.data_of(config, base, kind, data)
    return {name: sft.weighted(s.train[: s.per_step]) for name, s in students.items()}


@pytest.mark.parametrize("name", NAMES)
def test_config_loads_and_is_whole(name):
    config = load(name)
    assert config.job in SETTINGS
    assert getattr(config, "dtype", "float32") in base_lib.DTYPES
    if hasattr(config, "mesh") and config.job != "scale_up":  # whose mesh is that of a pod
        mesh.make_mesh(vars(config.mesh), jax.devices()[:1])
    if hasattr(config, "base"):
        assert load(name, f"--config.base={config.base}x").base == config.base + "x"
    with pytest.raises(UserError, match="baze is no setting"):
        load(name, "--config.baze=tiny-random")
    file = name.split(":")[0]
    assert f"--config={file}" in (ROOT / file).read_text(), "the docstring gives the command"


@pytest.mark.parametrize("name", [n for n in NAMES if load(n).job in TRAINING])
def test_training_config_traces(name, pretrained):
    config = load(name)
    base = abstract_base(config, pretrained)
    specs = transformer.abstract(base.cfg)
    policies = {n: start.policy_config(n, section, 0) for n, section in config.policies.items()}
    groups = training_groups(config, base)
    assert set(groups) == set(policies)

    ordered = sorted(policies, key=lambda n: policies[n].adapter.bucket)
    batch, _ = pack([groups[n] for n in ordered], ShapeBook(), context=base.cfg.context)
    assert (batch.loss.pair_weights.shape[1] > 0) == (config.job == "dpo")
    state = jax.eval_shape(lambda: state_lib.empty(specs, [policies[n].adapter for n in ordered]))
    slots = {b: np.arange(stack.steps.shape[0], dtype=np.int32) for b, stack in state.items()}
    coefs = stack_coefs([policies[n].loss for n in ordered])
    fn = lambda *args: step.forward_backward(*args, cfg=base.cfg, remat=config.remat)  # noqa: E731
    new, logp, metrics = jax.eval_shape(fn, base.params, state, batch, coefs, slots)
    assert (new, logp.shape) == (state, batch.target.shape)
    hyper = {b: state_lib.stack_hyper([], len(own)) for b, own in slots.items()}
    new, metrics = jax.eval_shape(step.optim_step, new, slots, hyper)
    assert (new, metrics["grad_norm"].shape) == (state, (len(policies),))

    if config.job == "grpo":
        stacks = {b: stack.adapters for b, stack in state.items()}
        samples = sum(len(g.sequences) for n in ordered for g in groups[n])
        table = longest_table(base.cfg.context)
        pool = device.pool_specs(base.cfg, 64, base.dtype, routes=base.cfg.experts is not None)
        blocks = plans.blocks_plan([[]], BLOCKS, table, stacks)
        rows, _ = plans.rows_plan([], samples, 1, table, base.cfg.vocab_size, stacks)
        args = base.params, stacks, pool
        prefill, decode = (
            functools.partial(fn, cfg=base.cfg) for fn in (device.prefill, device.decode)
        )
        assert jax.eval_shape(prefill, *args, blocks) == (pool, None)
        new, drawn = jax.eval_shape(decode, *args, rows, jnp.int32(8))
        assert (new, drawn.tokens.shape) == (pool, (samples, device.STEPS))


def test_other_configs_build():
    for name in NAMES:
        config = load(name)
        if config.job == "evaluate":
            environment = config.env.make()
            assert len(environment.held_out) >= config.examples
            Request(**config.sampling.given, prompt=(1,))
        elif config.job == "scale_up" and config.model["architectures"][0] in hf_config.FAMILIES:
            cfg = hf_config.from_hf(config.model).replace(kernels=config.kernels)
            devices = mesh.make_mesh(dict.fromkeys(vars(config.mesh), 1), jax.devices()[:1])
            plan = Plan(cfg, devices, DTYPES[config.dtype], config.adapter)
            assert len(list(plan.programs(config.train, config.rollout))) == 4
        elif config.job == "sample":
            base = types.SimpleNamespace(tokenizer=None)
            sample.request_of(base, {"tokens": [1]}, vars(config.sampling), name)  # type: ignore[arg-type]
        elif config.job in ("serve", "fleet"):
            assert serve.sizes_of(config).slots
        elif config.job == "convert":
            assert min(config.sizes.values()) == 1
        else:
            known = TRAINING | {"score", "scale_up"}
            assert config.job in known, f"{name}: say here what its config builds into"
