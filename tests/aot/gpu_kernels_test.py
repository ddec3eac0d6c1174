"""What ``ptxas`` tells of the GPU kernels; where the CUDA wheels are installed, one of each op is
compiled.
"""

import jax
import pytest

from mint_jax.aot import chips, gpu_kernels
from mint_jax.errors import UserError
from pallas_kernels.calls import calls


def test_an_h200s_compiler_takes_the_kernels(tmp_path):
    try:
        target = chips.target("cuda:h200x1")
    except UserError as missing:
        pytest.skip(str(missing))
    first = {}
    for call in calls(target.devices[0], "cuda"):
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
