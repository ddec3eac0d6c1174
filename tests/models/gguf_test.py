"""GGUF conversion: tensors and token ids identical to those transformers reads from the same
file.
"""

import functools
import importlib.util
import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import safetensors.torch
import torch
import transformers

from mint_jax.data.tokenizer import Tokenizer
from mint_jax.models import base as base_lib
from mint_jax.models import gguf as ours
from tests.models.gguf_files import LAYERS, write
from tests.models.hf_config_test import message


@pytest.fixture(scope="module")
def smollm2_file():
    """The packaged GGUF file, parsed once (transformers would do it for the config, the weights and
    the tokenizer).
    """
    _, module, file, _ = base_lib.PACKAGED["smollm2-135m-instruct"]
    spec = importlib.util.find_spec(module)
    read = functools.cache(gguf.GGUFReader)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf, "GGUFReader", lambda path: read(str(path)))
        # asked for once a module
        patch.setattr(gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map))
        yield Path(spec.submodule_search_locations[0]) / file


@pytest.fixture(scope="module")
def converted(smollm2_file, tmp_path_factory):
    return ours.convert(smollm2_file, tmp_path_factory.mktemp("converted") / "smollm2")


def _same_tensors(directory, model):
    """Every tensor of our file equals the model's, and the model has no other."""
    state = model.state_dict()
    mine = safetensors.torch.load_file(directory / "model.safetensors")
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    assert set(mine) == set(state) - tied
    for name, value in mine.items():
        assert value.dtype == torch.float32
        assert torch.equal(value, state[name]), name
    return len(mine)


@pytest.mark.long
def test_smollm2_tensors_and_config_equal_those_of_transformers(converted, smollm2_file):
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        smollm2_file.parent, gguf_file=smollm2_file.name, dtype=torch.float32
    )
    assert _same_tensors(converted, theirs) == 272
    config = transformers.AutoConfig.from_pretrained(converted)
    same = "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "rms_norm_eps"
    for field in (*same, "num_attention_heads", "num_key_value_heads", "max_position_embeddings"):
        assert getattr(config, field) == getattr(theirs.config, field), field
    assert config.rope_parameters["rope_theta"] == 1e5


TEXTS = [
    "The quick brown fox; it's 12,345.67% of they've and WE'LL!",
    "tabs\tand\t\ttabs\r\nlines\n\n\n   indented, trailing   ",
    "漢字と仮名、한국어 텍스트。Ελληνικά, русский, עברית",
    "naïve café 😀👍🏽 e\u0301 \u200d \u00a0",
    "def f(x): return {'a': x**2}  # 0x1F 1e-5",
    "<|im_start|>user\nHi<|im_end|>\n<|endoftext|>",
    " ",
    "",
]


def test_smollm2_token_ids_equal_those_of_transformers(converted, smollm2_file):
    mine = Tokenizer(converted)
    theirs = transformers.AutoTokenizer.from_pretrained(
        smollm2_file.parent, gguf_file=smollm2_file.name
    )
    for text in TEXTS:
        assert mine.encode(text) == theirs(text)["input_ids"], text
        assert mine.decode(mine.encode(text), skip_special=False) == text
    assert mine.vocab_size == len(theirs) == 49152
    assert [mine.encode(token) for token in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")] == [
        [0],
        [1],
        [2],
    ]
    assert len(mine.encode("20250131")) == 8  # digits are single tokens
    assert mine.eos_ids == (2,)
    messages = [
        {"role": "user", "content": "Hi\t2"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "?"},
    ]
    for chat in (messages, [{"role": "system", "content": "Be brief."}, *messages]):
        rendered = theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        assert mine.render(chat) == rendered
        assert mine.encode_chat(chat) == theirs(rendered)["input_ids"]


@pytest.mark.parametrize(
    ("kind", "tied"), [("F32", True), ("F16", False), ("Q8_0", False), ("Q4_1", True)]
)
def test_tiny_files_of_every_type_convert_as_transformers_reads_them(kind, tied, tmp_path, rng):
    kind = gguf.GGMLQuantizationType[kind]
    put_in = write(tmp_path / "tiny.gguf", rng, tied, kind)
    directory = ours.convert(tmp_path / "tiny.gguf", tmp_path / "out")
    mine = safetensors.torch.load_file(directory / "model.safetensors")
    assert set(mine) == set(put_in)
    for name, value in put_in.items():
        np.testing.assert_array_equal(mine[name].numpy(), value, err_msg=name)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="tiny.gguf", dtype=torch.float32
    )
    assert _same_tensors(directory, theirs) == 9 * LAYERS + 3 - tied
    assert json.loads((directory / "config.json").read_text())["tie_word_embeddings"] is tied
    assert Tokenizer(directory).encode("abc ab1<|end|>") == [39, 37, 38, 28, 0]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architecture": "gemma3"}, "has architecture 'gemma3'"),
        ({"tokenizer": "llama"}, "tokenizer 'llama'; only 'llama' with a byte-level BPE"),
        ({"pre": "llama-bpe"}, "'llama-bpe' is not covered; expected 'smollm'"),
        ({"fields": lambda w: w.add_rope_scaling_factor(4.0)}, "'llama.rope.scaling.factor' is 4"),
        ({"extra": ["blk.0.attn_q.bias"]}, "blk.0.attn_q.bias"),
    ],
)
def test_files_that_are_not_covered_are_refused(changes, words, tmp_path, rng):
    write(tmp_path / "tiny.gguf", rng, **changes)
    assert words in message(ours.convert, tmp_path / "tiny.gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()
