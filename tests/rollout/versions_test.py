"""Prompts in the cache belong to one version of the weights: what a policy read before an update is
not read after it.

Versions are numbers of the trainer's, there as soon as weights may have changed; nothing here
computes a digest.
"""

import dataclasses

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


def test_a_prompt_is_found_again_by_the_version_that_read_it_and_by_no_other(rng, tiny_base):
    """After an update, new weights, and a state that is set as a checkpoint is restored."""
    base, loss = tiny_base("llama"), LossConfig("cross_entropy")
    adapter, read = AdapterConfig(2, 4.0, ("q", "down")), set()
    trainer = Trainer(base, [PolicyConfig(name, adapter, loss=loss) for name in NAMES])
    prompt = tuple(rng.integers(0, 96, WHOLE + 5).tolist())
    engine = Engine(base, rows=(8,))

    def load(name) -> None:
        trainer.load_adapter(name, random_adapter(rng, base, adapter))

    def sample(name) -> None:
        """A hit exactly where this version has read the prompt before, and the answer of an engine
        that has read nothing.
        """
        version = trainer.versions[name]
        request = Request(prompt, trainer.slots[name], temperature=0.0, max_tokens=6)
        named = dataclasses.replace(request, version=version)
        [[found]] = engine.generate([named], trainer.stacks)
        assert found.reused == (WHOLE if version in read else 0)
        read.add(version)
        [[fresh]] = Engine(base, rows=(8,)).generate([request], trainer.stacks)
        assert (found.tokens, found.logprobs) == (fresh.tokens, fresh.logprobs)

    for name in NAMES:
        load(name)
    ever = set(trainer.versions.values())
    changes = {
        "a": lambda: trainer.update({"a": [random_group(rng, 4, (5,))]}),
        "b": lambda: load("b"),
        "ab": lambda: setattr(trainer, "state", jax.tree.map(np.array, trainer.state)),
    }
    for names, change in changes.items():
        for name in (*NAMES, *NAMES):
            sample(name)
        before = trainer.versions
        change()
        new = {n: v for n, v in trainer.versions.items() if v != before[n]}
        assert set(new) == set(names)
        assert len({*new.values()} - ever) == len(new), "no version comes twice"
        ever |= {*new.values()}
    for name in NAMES:
        sample(name)
