"""Prompts in the cache belong to one version of the weights: what a policy read before an update is
not read after it.

Versions are numbers of the trainer's, there as soon as weights may have changed; nothing here
computes a digest.
"""

import jax
import numpy as np
import pytest

from mint_jax.lora.tree import AdapterConfig
from mint_jax.models.paged import PAGE
from mint_jax.rollout.engine import Engine
from mint_jax.rollout.request import Request
from mint_jax.train.trainer import LossConfig, PolicyConfig, Trainer
from tests.train.trainer_test import random_adapter, random_group

NAMES = ("a", "b")
WHOLE = 2 * PAGE  # tokens of a prompt's whole blocks


class World:
    """Two policies of one bucket in training, one engine over their slots, and which versions have
    read the prompt.
    """

    def __init__(self, rng, base):
        self.rng, self.base = rng, base
        configs = [
            PolicyConfig(
                name, AdapterConfig(2, 4.0, ("q", "down")), loss=LossConfig("cross_entropy")
            )
            for name in NAMES
        ]
        self.trainer = Trainer(base, configs)
        for name in NAMES:
            self.load(name)
        self.prompt = tuple(rng.integers(0, 96, WHOLE + 5).tolist())
        self.engine, self.read = Engine(base, rows=(8,)), set()

    def request(self, name, **fields) -> Request:
        return Request(
            self.prompt, self.trainer.slots[name], temperature=0.0, max_tokens=6, **fields
        )

    def sample(self, name) -> None:
        """A hit exactly where this version has read the prompt before, and the answer of an engine
        that has read nothing.
        """
        version = self.trainer.versions[name]
        [[found]] = self.engine.generate([self.request(name, version=version)], self.trainer.stacks)
        assert found.reused == (WHOLE if version in self.read else 0)
        self.read.add(version)
        [[fresh]] = Engine(self.base, rows=(8,)).generate([self.request(name)], self.trainer.stacks)
        assert (found.tokens, found.logprobs) == (fresh.tokens, fresh.logprobs)

    def update(self, name) -> None:
        self.trainer.update({name: [random_group(self.rng, 4, (5,))]})

    def load(self, name) -> None:
        self.trainer.load_adapter(
            name, random_adapter(self.rng, self.base, self.trainer.policies[name].adapter)
        )


@pytest.mark.long
def test_a_prompt_is_found_again_by_the_version_that_read_it_and_by_no_other(rng, tiny_base):
    world = World(rng, tiny_base("llama"))
    ever = set(world.trainer.versions.values())
    for _ in range(6):
        for name in (*NAMES, *NAMES):
            world.sample(name)
        before = world.trainer.versions
        name = NAMES[rng.integers(2)]
        act = rng.integers(3)
        if act == 0:
            world.update(name)
        elif act == 1:
            world.load(name)
        else:  # as a checkpoint is restored
            world.trainer.state = jax.tree.map(np.array, world.trainer.state)
        versions = world.trainer.versions
        changed = {n for n in NAMES if versions[n] != before[n]}
        assert changed == (set(NAMES) if act == 2 else {name})
        new = {versions[n] for n in changed}
        assert len(new) == len(changed)
        assert not new & ever, "no version comes twice"
        ever |= new


def test_a_slot_without_a_version_shares_no_prompt_with_a_version(rng, tiny_base):
    world = World(rng, tiny_base("llama"))
    world.sample("a")
    [[found]] = world.engine.generate([world.request("a")], world.trainer.stacks)
    assert found.reused == 0
    world.sample("a")
