"""Prompts in the cache belong to one version of the weights: what a policy read before an update is
not read after it.

Versions are numbers of the trainer's, there as soon as weights may have changed; nothing here
computes a digest.
"""

import jax
import numpy as np

from mint_jax.lora.tree import AdapterConfig
from mint_jax.models.paged import PAGE
from mint_jax.rollout.engine import Engine
from mint_jax.rollout.request import Request
from mint_jax.train.trainer import LossConfig, PolicyConfig, Trainer
from tests.adapters import random_adapter
from tests.train.trainer_test import random_group

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

    def load(self, name) -> None:
        self.trainer.load_adapter(
            name, random_adapter(self.rng, self.base, self.trainer.policies[name].adapter)
        )


def test_a_prompt_is_found_again_by_the_version_that_read_it_and_by_no_other(rng, tiny_base):
    """After an update, new weights, and a state that is set as a checkpoint is restored."""
    world = World(rng, tiny_base("llama"))
    trainer, ever = world.trainer, set(world.trainer.versions.values())
    changes = {
        "a": lambda: trainer.update({"a": [random_group(rng, 4, (5,))]}),
        "b": lambda: world.load("b"),
        "ab": lambda: setattr(trainer, "state", jax.tree.map(np.array, trainer.state)),
    }
    for names, change in changes.items():
        for name in (*NAMES, *NAMES):
            world.sample(name)
        before = trainer.versions
        change()
        new = {n: v for n, v in trainer.versions.items() if v != before[n]}
        assert set(new) == set(names)
        assert len({*new.values()} - ever) == len(new), "no version comes twice"
        ever |= {*new.values()}
    for name in NAMES:
        world.sample(name)
