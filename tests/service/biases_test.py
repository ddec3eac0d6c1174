"""A server with slots for biases: it samples their revisions beside LoRA, and trains LoRA only."""

import dataclasses

import jax
import numpy as np
import pytest

from mint_jax.catalog.packed import Schema, pack
from mint_jax.errors import UserError
from mint_jax.lora.tree import AdapterConfig
from mint_jax.recipes.serve import sizes_of
from mint_jax.service.server import Server
from mint_jax.service.training_calls import Create
from tests.adapters import random_adapter
from tests.configs import load
from tests.exchange import our_logits
from tests.service.checkpoints_test import sampled
from tests.service.server_test import SIZES, model_of, run

BIAS = AdapterConfig(kind="bias")
PROMPT = (3, 14, 15, 9)


def test_a_server_samples_biases_and_trains_lora(tiny_base, tmp_path, rng):
    sizes = sizes_of(load("configs/serve.py:ci", "--config.ranks=(0,8)"))
    assert sizes.adapters.keys() == {0, 8}
    assert sizes.slots.keys() == {8}
    base, sizes = tiny_base("llama"), dataclasses.replace(SIZES, adapters={0: 2, 2: 1})
    with Server(base, tmp_path / "server", sizes).running() as server:
        for name, config in (("bias", BIAS), ("lora", AdapterConfig(2))):
            adapter = random_adapter(rng, base, config)
            data = pack(adapter, Schema(base.fingerprint, config))
            digest = server.catalog.export(name, data, 0, create=True).digest
            tokens, logprobs = sampled(server, digest, PROMPT)
            logits = our_logits(base, adapter, config, np.array([[*PROMPT, *tokens]]))
            wanted = np.asarray(jax.nn.log_softmax(logits[0, len(PROMPT) - 1 : -1]))
            # float32 through 3 layers
            np.testing.assert_allclose(logprobs, wanted[range(len(tokens)), tokens], atol=1e-4)
        with pytest.raises(UserError, match="has bias alone; this server trains ranks up to 2"):
            run(server, model_of(server)[1], Create(BIAS))
