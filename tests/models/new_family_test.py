"""The family that the page of bases adds: its two entries are enough for transformers' logits and
PEFT's gradients.
"""

import re
from pathlib import Path
from unittest import mock

import pytest

from mint_jax.errors import UserError
from mint_jax.models import base as base_lib
from mint_jax.models.hf import LAYER_NAMES
from mint_jax.models.hf_config import FAMILIES, read_config
from tests import oracles
from tests.lora import peft_oracle_test

PAGE = Path(__file__).parents[2] / "docs/bases.md"
MAX_LINES = 120


def test_the_pages_family_equals_transformers_and_peft(rng, mesh, tmp_path, monkeypatch):
    [code] = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert code.count("\n") < MAX_LINES
    monkeypatch.setitem(oracles.TINY, "seed_oss", ("SeedOssConfig", {"tie_word_embeddings": False}))
    directory = oracles.save_tiny("seed_oss", tmp_path / "base")
    with pytest.raises(UserError, match="SeedOssForCausalLM"):
        read_config(directory)
    with mock.patch.dict(FAMILIES), mock.patch.dict(LAYER_NAMES):
        exec(code, {})
        base = base_lib.load(str(directory), mesh)
        assert (base.cfg.qkv_bias, base.cfg.o_bias) == (True, False)
        peft_oracle_test.compare(
            base, directory, peft_oracle_test.MIXED, rng, tmp_path / "adapters"
        )
