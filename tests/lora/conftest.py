"""Directories by PEFT's ``save_pretrained``."""

import warnings

import peft
import pytest
import torch

from tests import oracles
from tests.exchange import randomise

torch.set_num_threads(1)  # tiny matrices: more threads only wait for each other


@pytest.fixture
def saved(rng, hf_dirs, tmp_path):
    """``saved(family, **LoraConfig)`` -> a directory by PEFT's ``save_pretrained``, random in A and
    B, and its torch model.
    """

    def save(family, dtype=torch.float32, **fields):
        torch.manual_seed(int(rng.integers(2**31)))
        config = peft.LoraConfig(
            **({"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "down_proj"]} | fields)
        )
        model = randomise(peft.get_peft_model(oracles.torch_model(hf_dirs(family)), config).eval())
        if dtype != torch.float32:
            for name, p in model.named_parameters():
                p.data = p.data.to(dtype) if "lora_" in name else p.data
        with warnings.catch_warnings():
            # that it also writes the embedding itself, where that is a target
            warnings.simplefilter("ignore")
            model.save_pretrained(tmp_path / "peft")
        return tmp_path / "peft", model

    return save
