"""Tables of measured sizes: when they are taken, what programs they make, and how the search fills
them.
"""

import functools
import json
import re
from pathlib import Path

import jax
import pytest

from benchmarks import timing, tune_kernels
from pallas_kernels import packed_lora, tuning
from pallas_kernels.calls import Call, calls
from pallas_kernels.packed_lora import pallas_gpu, reference
from pallas_kernels.packed_lora.shapes import Shape
from tests.pallas_kernels import gpu
from tests.pallas_kernels.packed_lora_test import arguments, close

DEVICE = "NVIDIA H200"


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("MINT_JAX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def entry(sizes):
    return {"config": tuning.as_dict(sizes)}


def grids(text: str) -> set[str]:
    return set(re.findall(r"grid_x = (\d+)", text))


def test_a_table_comes_before_the_rule_on_its_device_alone(rng, empty_cache):
    x, a, b, onto, factor = arguments(rng, 70, 128, (128,), 16, 9, "float32")
    with tuning.noted() as notes:
        rule = pallas_gpu.config("packed_lora", x, a)
    [choice] = notes
    assert choice == ("packed_lora", "cuda", choice.key, rule)
    other = rule._replace(rows=2 * rule.rows, stages=rule.stages + 1)
    tuning.write(
        "packed_lora", DEVICE, {choice.key: entry(other)}, empty_cache / "tuned" / "packed_lora"
    )
    assert pallas_gpu.config("packed_lora", x, a) == rule, "this is a CPU"
    with tuning.on("NVIDIA B200"):
        assert pallas_gpu.config("packed_lora", x, a) == rule
    with tuning.on(DEVICE):
        assert pallas_gpu.config("packed_lora", x, a) == other
        assert pallas_gpu.config("packed_lora backward", x, a) == rule, "its own table"
        assert pallas_gpu.config("packed_lora", x[:, :64], [w[:, :, :64] for w in a]) == rule, (
            "another key"
        )
        with tuning.trying("packed_lora", rule):
            assert pallas_gpu.config("packed_lora", x, a) == rule
    assert pallas_gpu.config("packed_lora", x, a) == rule


def test_a_program_has_the_sizes_of_what_it_is_for_whatever_was_compiled_before(rng, empty_cache):
    """One function, traced for a device without a table, with one, and without again."""
    args = arguments(rng, 70, 128, (128,), 16, 9, "float32")
    call = functools.partial(packed_lora.packed_lora, implementation="auto")
    with tuning.noted() as notes:
        before = gpu.text(call, *args)
    choice = next(one for one in notes if isinstance(one.sizes, pallas_gpu.Config))
    tuning.write(
        "packed_lora",
        DEVICE,
        {choice.key: entry(choice.sizes._replace(rows=64))},
        empty_cache / "tuned" / "packed_lora",
    )
    assert choice.sizes.rows != 64
    with tuning.on(DEVICE):
        tuned = gpu.text(call, *args)
    assert grids(before) != grids(tuned)
    assert grids(gpu.text(call, *args)) == grids(before)
    with tuning.trying("packed_lora", choice.sizes._replace(rows=64)):
        assert grids(gpu.text(call, *args)) == grids(tuned)


def interpreted(rng) -> tuple[Call, tuple]:
    args = arguments(rng, 70, 128, (128,), 16, 9, "float32")
    call = lambda x, a, b, onto, factor: pallas_gpu.add(x, a, b, onto, factor, interpret=True)  # noqa: E731
    return (
        Call("packed_lora", Shape(70, 128, (128,), 16, 9, "float32"), call, (), (), lambda rng: ()),
        args,
    )


def test_the_search_ends_at_the_fastest_sizes_and_programs_take_them(rng, monkeypatch, tmp_path):
    """By a clock of our own, for an interpreter's times say nothing; results are the
    interpreter's.
    """
    call, args = interpreted(rng)

    def clock(what, sides, n, warm=1):
        def seconds(name):
            rows = {"rule": 16, "best": 64}.get(name) or int(re.search(r"rows=(\d+)", name)[1])
            return 1 + abs(rows - 64) / 64

        return {name: [seconds(name) * (1 + 0.001 * k) for k in range(n)] for name in sides}

    monkeypatch.setattr(timing, "in_turn", clock)
    found = tune_kernels.search(call, "cuda", args, 5, 8, 0.0)
    assert (found.rule.rows, found.best) == (16, found.rule._replace(rows=64))
    assert found.ratio["interval"][0] > 1.5
    for to_cache in (False, True):
        tune_kernels.keep(found, call.op, DEVICE, tmp_path / "work", to_cache)
        with tuning.on(DEVICE):
            assert (pallas_gpu.config("packed_lora", args[0], args[1]) == found.best) == to_cache
    assert json.loads(
        (tmp_path / "work" / "tuned" / "packed_lora" / "nvidia_h200.json").read_text()
    )["packed_lora"][found.key]["ratio"]
    with tuning.on(DEVICE):
        close(call.fn(*args), reference.packed_lora(*args), "float32")


SHIPPED = sorted(Path(tuning.__file__).parent.glob("*/tuned/*.json"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: f"{path.parts[-3]} {path.stem}")
def test_a_shipped_table_is_of_keys_and_sizes_that_its_kernel_has(path):
    """And what is lowered for that device takes them."""
    held, device = json.loads(path.read_text()), path.stem.replace("_", " ")
    assert tuning.filename(device) == path.name
    seen = set()
    with tuning.on(device), gpu.abstract():
        for call in calls(jax.devices()[0], "cuda"):
            if call.op not in held:
                continue
            with tuning.noted() as notes:
                jax.jit(lambda *args, call=call: call.fn(*args)).trace(*call.args).lower(
                    lowering_platforms=("cuda",)
                )
            for note in notes:
                if note.key in held.get(note.op, {}):
                    assert tuning.as_dict(note.sizes) == held[note.op][note.key]["config"]
                    seen.add((note.op, note.key))
    assert seen == {(op, key) for op, entries in held.items() for key in entries}
