"""Which kernels `make test` interprets: all of XLA's forms and of TPUs, and of GPUs one case of
each op.
"""

import pytest
from jax.experimental.pallas import tpu as pltpu

from tests.marks import has_value


@pytest.fixture
def racing():
    """``racing(call, *args, **how)`` runs a kernel in the interpreter that keeps a TPU's memories
    and clocks, where scratch begins as NaN, and finds no races.
    """
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    def run(call, *args, cores=1, **how):
        params = pltpu.InterpretParams(detect_races=True, num_cores_or_threads=cores)
        made = call(*args, interpret=params, **how)
        assert not interpret_pallas_call.races.races_found
        return made

    return run


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    seen = set()
    for item in items:
        if "pallas_kernels" in item.path.parts and has_value(item, "pallas_gpu"):
            if item.path in seen:
                item.add_marker(pytest.mark.long)
            seen.add(item.path)
