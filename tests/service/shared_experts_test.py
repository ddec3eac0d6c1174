"""A server whose adapters of experts share factors: trained, exported and sampled as such."""

import dataclasses

import jax
import numpy as np
import pytest

from mint_jax.catalog.cli.peft_files import packed_object
from mint_jax.catalog.cli.sources import Source
from mint_jax.catalog.packed import unpack
from mint_jax.errors import UserError
from mint_jax.lora import peft, tree
from mint_jax.models.outline import Outline, peft_tables
from mint_jax.service import external
from mint_jax.service.server import Server
from mint_jax.service.training_calls import Create, Save
from tests.exchange import our_logits
from tests.service.checkpoints_test import sampled, update
from tests.service.server_test import SIZES, model_of, run

PROMPT = (3, 14, 15, 9)


@pytest.mark.long
def test_a_server_trains_exports_and_samples_experts_with_shared_factors(tiny_base, tmp_path, rng):
    base, sizes = tiny_base("qwen3_moe"), dataclasses.replace(SIZES, experts="shared_outer")
    with Server(base, tmp_path / "server", sizes).running() as server:
        config = server.adapter_config(2, {})
        assert config.experts == "shared_outer"
        assert server.adapter_config(2, {"train_mlp": False}).experts == "each", "without experts"
        _, model = model_of(server)
        save = Save("sampler_weights", "s")
        _, results = run(server, model, Create(config), *update(rng), save)
        digest = server.checkpoints.digest("default", results[-1]["path"])
        adapter, schema = unpack(server.catalog.load(digest))
        assert schema.config.experts == "shared_outer"
        tree.check_fits(adapter, schema.config, server.specs, "the revision")
        shared = adapter["moe"]["moe"]["experts"]["shared_outer"]
        assert np.abs(shared["down"]["b"]).max() > 0, "B moved from 0"
        # sampled as an adapter with equal factors computes
        tokens, logprobs = sampled(server, digest, PROMPT)
        logits = our_logits(base, tree.expanded(adapter), config, np.array([[*PROMPT, *tokens]]))
        wanted = np.asarray(jax.nn.log_softmax(logits[0, len(PROMPT) - 1 : -1]))
        # float32 through 3 layers
        np.testing.assert_allclose(logprobs, wanted[range(len(tokens)), tokens], atol=1e-4)
        # exported with a copy for each expert
        state = server.durable.do(model, lambda live: live.read_state(model)).result(60.0)
        files = external.files_of(state, base)
        (tmp_path / "peft").mkdir()
        for name, data in files.items():
            (tmp_path / "peft" / name).write_bytes(data)
        back, read = peft.read_peft(tmp_path / "peft", *peft_tables(base.cfg))
        assert read.experts == "each"
        jax.tree.map(np.testing.assert_array_equal, back, tree.expanded(adapter))
        about = Outline("base", base.cfg, base.fingerprint)
        source = Source(tmp_path / "peft", True, tmp_path)
        data = packed_object(source, about, "float32", False, 1 << 30, "shared_outer")
        again, schema = unpack(data)
        assert schema.config.experts == "shared_outer"
        jax.tree.map(np.testing.assert_array_equal, again, adapter)
        _, other = model_of(server)
        with pytest.raises(
            UserError, match="has experts 'each'; this server trains 'shared_outer'"
        ):
            run(server, other, Create(dataclasses.replace(config, experts="each")))
        _, attention = model_of(server)
        config = server.adapter_config(2, {"train_mlp": False})
        assert None not in run(server, attention, Create(config), *update(rng), save)[1]
