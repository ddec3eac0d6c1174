"""Kinds of adapters beside LoRA: updates against torch in float64 in one batch with LoRA, and the
same revision in every form.
"""

import chex
import numpy as np
import pytest
import torch

import mint_jax as mint
from mint_jax import params as params_lib
from mint_jax.catalog import orbax_files
from mint_jax.catalog.packed import digest_of, pack, unpack
from mint_jax.lora.basis import basis
from mint_jax.lora.tree import AdapterConfig
from mint_jax.train.state import OptimizerConfig
from mint_jax.train.trainer import LossConfig, PolicyConfig, Trainer
from tests import oracles
from tests.adapters import random_adapter
from tests.groups import random_groups
from tests.lora.basis_test import rows_of_basis
from tests.train.torch_lora import MODULES

CONFIGS = {"bias": AdapterConfig(kind="bias"), "basis": AdapterConfig(3, 6.0, kind="basis")}
RATE = 3e-3


class TorchUpdates:
    """A float64 checkpoint whose linear layers get biases, or A over a fixed B, by AdamW."""

    def __init__(self, directory, adapter, scale):
        self.model = oracles.torch_model(directory, torch.float64).requires_grad_(False)
        self.own = {}
        for leaf, x in params_lib.leaves_with_path(adapter):
            path, name = leaf.rsplit("/", 1)
            for layer, numbers in enumerate(np.asarray(x, np.float64)):
                module = self.model.get_submodule(MODULES[path].format(layer))
                own = self.own[leaf, layer] = torch.nn.Parameter(torch.tensor(numbers))
                if name == "bias":
                    assert module.bias is None
                    module.register_forward_hook(lambda _, x, y, own=own: y + own[0])
                    continue
                b = rows_of_basis(path, layer, len(x), x.shape[1], module.out_features)
                b = torch.tensor(b, dtype=torch.float64)
                module.register_forward_hook(lambda _, x, y, a=own, b=b: y + scale * x[0] @ a.T @ b)
        self.optimizer = torch.optim.AdamW(self.own.values(), RATE, eps=1e-5, weight_decay=0.1)

    def update(self, groups) -> float:
        total = torch.zeros((), dtype=torch.float64)
        for group in groups:
            for s in group.sequences:
                row, n = [*group.prefix, *s.tokens], len(s.tokens)
                logp = torch.log_softmax(self.model(torch.tensor([row])).logits[0], -1)
                picked = logp[range(len(row) - n - 1, len(row) - 1), s.tokens]
                total = total - (torch.tensor(s.weights) * picked).sum()
        self.optimizer.zero_grad()
        total.backward()
        torch.nn.utils.clip_grad_norm_(self.own.values(), 1.0)
        self.optimizer.step()
        return float(total.detach())


@pytest.mark.parametrize("kind", CONFIGS)
def test_five_updates_in_one_batch_with_lora_match_torch_in_float64(kind, rng, tiny_base, hf_dirs):
    """A basis keeps its bits, and its gradient does not count in the norm that is clipped."""
    base, config = tiny_base("llama"), CONFIGS[kind]
    optimizer = OptimizerConfig(RATE, eps=1e-5, weight_decay=0.1)
    how = optimizer, LossConfig("cross_entropy")
    policies = PolicyConfig("lora", AdapterConfig(3), *how), PolicyConfig("own", config, *how)
    trainer = Trainer(base, policies)
    # with biases of zero a key's gradient is rounding alone
    start = random_adapter(rng, base, config)
    trainer.load_adapter("own", start)
    oracle = TorchUpdates(hf_dirs("llama"), start, config.scale)
    for _ in range(5):
        data = {name: random_groups(rng, base.cfg.vocab_size) for name in ("lora", "own")}
        ours, theirs = trainer.forward_backward(data)["own"]["loss"], oracle.update(data["own"])
        trainer.optim_step(list(data))
        assert abs(ours - theirs) <= 5e-5
    for leaf, x in params_lib.leaves_with_path(trainer.adapter("own")):
        expected = np.stack([oracle.own[leaf, i].detach() for i in range(len(x))])
        np.testing.assert_allclose(x, expected, rtol=0, atol=1e-4 * np.abs(expected).max())
    slot = trainer.slots["own"]
    for path, x in params_lib.leaves_with_path(trainer.state[slot.bucket].adapters.factors):
        if path.endswith("/b"):
            own = np.asarray(x[:, slot.index, : config.rank])
            np.testing.assert_array_equal(own, basis(path[:-2], own.shape))


@pytest.mark.parametrize("kind", CONFIGS)
def test_one_revision_trains_on_and_is_sampled_beside_lora(kind, mesh, tmp_path):
    """Through the Python interface: saved, loaded into a slot, and resumed with the same bits."""
    rows = [{"prompt": f"{i} + 1 =", "completion": f" {i + 1}"} for i in range(4)]
    how = {"temperature": 0.0, "max_tokens": 6}
    place = tmp_path / "c"
    with mint.load("tiny-random", mesh=mesh) as base, mint.open(place, create=True) as store:
        lora = base.policy("lora", rank=2, learning_rate=1e-2)
        rank, targets = CONFIGS[kind].rank or None, ["q", "o", "down"]
        own = base.policy("own", rank, kind=kind, targets=targets, learning_rate=0.1)
        assert own.config.adapter.size in repr(own)
        base.train_step({lora: rows, own: rows})
        for policy in (lora, own):
            policy.save(store)
        revisions = [None, store["lora@latest"], store["own@latest"], store["own@latest"]]
        mixed = base.completions(["2 + 1 ="] * 4, revisions, **how)
        for one, revision in zip(mixed, revisions):
            [alone] = base.completions(["2 + 1 ="], revision, **how)
            assert one[0].tokens == alone[0].tokens
            # programs of another number of rows: units of the last place
            np.testing.assert_allclose(one[0].logprobs, alone[0].logprobs, atol=1e-5)
        assert mixed[0][0].logprobs != mixed[2][0].logprobs
        file = own.save_state(tmp_path / "own.state")
        data = store.catalog.load(store["own@latest"].digest)
        base.train_step({own: rows})
        later = own.adapter()
        base.remove(own)
        base.resume(file).train_step(rows)
        chex.assert_trees_all_equal(base.policies["own"].adapter(), later)
        again = base.policy("again", start=store["own@latest"])
        assert again.config.adapter.kind == kind
        chex.assert_trees_all_equal(again.adapter(), unpack(data)[0])
        read = base.policy("read", start=base.policies["own"].export(tmp_path / "peft"))
        if kind == "bias":
            chex.assert_trees_all_equal(read.adapter(), later)
        else:  # PEFT's files have B
            assert read.config.adapter.kind == "lora"
    adapter, schema = unpack(data)
    only = {"bias": {"bias"}, "basis": {"a"}}[kind]
    assert {path.rsplit("/", 1)[1] for path, _ in params_lib.leaves_with_path(adapter)} == only
    assert digest_of(pack(adapter, schema)) == digest_of(data)
    orbax_files.write(tmp_path / "orbax", data, {})
    assert digest_of(orbax_files.read(tmp_path / "orbax", 1 << 20)) == digest_of(data)
