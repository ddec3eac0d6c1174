"""What ``ptxas`` tells of the GPU kernels; where the CUDA wheels are installed, one of each op is
compiled.
"""

import jax
import pytest

from mint_jax.aot import chips, gpu_kernels, kernel_calls
from mint_jax.errors import UserError

TOLD = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_packed_lora_rows' for 'sm_90a'
ptxas info    : Function properties for _packed_lora_rows
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 106 registers, used 1 barriers
ptxas info    : Compile time = 31.000 ms
ptxas info    : Compiling entry function 'loop_add_fusion' for 'sm_90a'
ptxas info    : Function properties for loop_add_fusion
    16 bytes stack frame, 12 bytes spill stores, 20 bytes spill loads
ptxas info    : Used 8 registers, used 0 barriers
"""


def test_registers_and_spills_are_read():
    assert gpu_kernels.kernels(TOLD) == [("_packed_lora_rows", 106, 0), ("loop_add_fusion", 8, 12)]
    assert gpu_kernels.kernels("") == []
    with pytest.raises(ValueError, match="something else"):
        gpu_kernels.kernels(TOLD.replace("Used", "Has"))


def test_an_h200s_compiler_takes_the_kernels(tmp_path):
    try:
        target = chips.target("cuda:h200x1")
    except UserError as missing:
        pytest.skip(str(missing))
    first = {}
    for call in kernel_calls.calls(target.devices[0], "cuda"):
        first.setdefault(call.name.split(" (")[0], call)
    for n, (name, call) in enumerate(first.items()):
        made, temporaries = gpu_kernels.compiled(call, target, tmp_path / str(n))
        assert made
        assert all(one.name.startswith("_" + name.split()[0]) for one in made)
        assert not any(one.spilled for one in made)
        # Parts of rows; a number of each query.
        assert temporaries < {
            "paged_attention": 16 << 20,
            "packed_attention backward": 4 << 20,
        }.get(name, 1 << 20)
    assert jax.default_backend() == "cpu"
