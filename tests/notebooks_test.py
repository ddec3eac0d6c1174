"""The notebooks run from top to bottom, are stored with their outputs, and name what exists."""

import ast
import importlib.util
import re
from pathlib import Path

import nbformat
import pytest

from notebooks import store
from tests.docs_test import LINKED, NAMED

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def it_learns(lines: list[str]) -> None:
    rewards = [
        float(line.split("reward ")[1].split(",")[0]) for line in lines if line.startswith("step ")
    ]
    gaps = [float(line.split("gap ")[1]) for line in lines if line.startswith("step ")]
    assert sum(rewards[-3:]) > sum(rewards[:3])
    assert max(gaps) < 1e-3  # float32: the sampler's and the trainer's own order of summation


def it_serves_what_the_names_say(lines: list[str]) -> None:
    alias = dict(
        line.split(" is ") for line in lines if line.startswith("customer-7@") and " is " in line
    )
    served = {
        words[0]: words[1]
        for line in lines
        if (words := line.split())[1:] and re.fullmatch("[0-9a-f]{12}", words[1])
    }
    assert alias["customer-7@latest"] == alias["customer-7@2"] != alias["customer-7@serving"]
    assert len(set(served.values())) == len(served) == 11
    assert alias["customer-7@serving"] == served["customer-7@serving"]
    assert alias["customer-7@latest"] == served["customer-7@latest"]
    assert "damaged: []" in lines
    assert [line.split(" - ")[0] for line in lines if line.startswith("damaged: customer")] == [
        "damaged: customer-7@2"
    ]
    assert any("no alias 'canary'" in line for line in lines)
    assert "removed ['customer-7@2'] kept [1, 3]" in lines


def all_paths_hand_over_the_same_policy(lines: list[str]) -> None:
    [slot] = [
        line.split(": ")[1].strip() for line in lines if line.startswith("from the training slot")
    ]
    [revision] = [
        line.split(":")[1].strip() for line in lines if line.startswith("from the revision")
    ]
    assert slot == revision
    bytes_of = [
        ast.literal_eval(line.split("bytes ")[1])
        for line in lines
        if "same first token True, bytes" in line
    ]
    assert len(bytes_of) == 2
    for paths in bytes_of:
        assert (
            paths["adapter_memory"]
            < paths["adapter_disk"]
            < paths["merged_memory"]
            < paths["merged_disk"]
        )


def schedules_differ_in_time_only(lines: list[str]) -> None:
    ends = [line for line in lines if "device busy" in line]
    assert [line.split(":")[0] for line in ends] == ["sequential", "overlapped", "batched"]
    moved, apart = (
        [float(re.findall(rf"{what} ([^,]+)", line)[0]) for line in ends]
        for what in ("moved", "sequential's")
    )
    assert min(moved) > 1e-6, "rewards differ, so the policies learn"
    assert apart[1] == 0.0, "overlapped runs the same programs"
    assert apart[2] < moved[2], "batched sums in another order, and does the same work"


def all_forms_hold_the_same_adapter(lines: list[str]) -> None:
    tensors = {
        line.split()[0]: int(line.split()[1].replace(",", ""))
        for line in lines
        if " tensors, " in line
    }
    assert tensors["unpacked"] > tensors["middle"] > tensors["packed"] == 14
    assert "the same values in the slot: True" in lines


def nobody_beats_who_knows_the_future(lines: list[str]) -> None:
    assert [line.split("errors: ")[1] for line in lines if line.startswith("resolve: ")] == ["0"]
    assert "policy-0000007@serving is number 1 of 4" in lines
    rates = [
        [float(rate) for rate in re.findall(r"0\.\d{3}", line)]
        for line in lines
        if line.endswith("with 16 slots")
    ]
    assert len(rates) == 3
    assert all(best >= ours > 0 and best >= lru > 0 for best, ours, lru in rates)


def pods_are_read_and_one_is_compiled(lines: list[str]) -> None:
    assert sum("B parameters on v5p:" in line for line in lines) == 7
    assert "v5p:4x4x8: fits" in lines
    [compiled] = [line for line in lines if line.startswith("decode for v5e:2x2")]
    assert "'tensor': 2" in compiled


def both_clients_sample_what_was_trained(lines: list[str]) -> None:
    for who in ("ann", "bob"):
        [before, after] = next(
            re.findall(r"[\d.]+(?= ->| a token)", line)
            for line in lines
            if line.startswith(f"{who}: loss")
        )
        assert before != after
        [at] = [
            k
            for k, line in enumerate(lines)
            if re.fullmatch(f"{who}, .* revision [0-9a-f]{{64}}", line)
        ]
        assert lines[at + 1].removeprefix("    tinker: ") == lines[at + 2].removeprefix(
            "    openai: "
        )
    assert any(re.match(r"the reader had [1-9]", line) for line in lines)
    assert "ended with 0" in lines


def kernels_agree_and_keep_adapters_apart(lines: list[str]) -> None:
    for name in ("xla", "pallas_tpu", "pallas_gpu"):
        mine = [line for line in lines if line.startswith(name)]
        [error, largest] = map(float, re.findall(r"[\d.]+(?:e-\d+)?(?= of values|$)", mine[0]))
        assert error < 1e-5 * largest, mine[0]  # float32 sums of 128 products
        assert mine[1].endswith("NaN: True; all others the same bits: True")
    assert "tpu {'tpu_custom_call': 1, '__gpu$xla.gpu.triton': 0}" in lines
    assert "cuda {'tpu_custom_call': 0, '__gpu$xla.gpu.triton': 1}" in lines
    assert any(line.startswith("1 kernel for v5e:2x2") for line in lines)


CHECKS = {
    "01_one_base_two_policies": it_learns,
    "02_a_population_of_policies": it_serves_what_the_names_say,
    "03_handoff": all_paths_hand_over_the_same_policy,
    "04_concurrent_training": schedules_differ_in_time_only,
    "05_packed_loading": all_forms_hold_the_same_adapter,
    "06_catalog_and_residency": nobody_beats_who_knows_the_future,
    "07_scale_up": pods_are_read_and_one_is_compiled,
    "08_serve_and_talk": both_clients_sample_what_was_trained,
    "09_kernels": kernels_agree_and_keep_adapters_apart,
}


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def stored(request):
    """Path and contents of a notebook as it is committed."""
    return request.param, nbformat.read(request.param, as_version=4)


def test_a_notebook_is_stored_with_its_outputs(stored):
    """Those of the code above them, small, and without anything of the machine that made them."""
    path, notebook = stored
    assert notebook.metadata.get("code") == store.code_digest(notebook), (
        f"python notebooks/store.py {path.stem} runs it again"
    )
    assert path.stat().st_size < store.BYTES
    assert store.texts(notebook)
    assert len(store.pictures(notebook)) <= 1
    for cell in notebook.cells:
        for out in cell.get("outputs", ()):
            assert out.output_type in ("stream", "display_data"), "no errors, no values"
            assert out.get("name", "stdout") == "stdout"
    assert not [
        line
        for text in store.texts(notebook)
        for line in text.splitlines()
        if store.PRIVATE.search(line)
    ]


def test_what_a_notebook_names_exists(stored):
    """Links, files in backticks, other notebooks by number, and modules of commands."""
    path, notebook = stored
    text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    missing = [link for link in LINKED.findall(text) if not (path.parent / link).exists()]
    missing += [name for name in NAMED.findall(text) if not any(ROOT.glob(name.rstrip("/")))]
    missing += [
        n
        for n in re.findall(r"[Nn]otebook (\d\d)", text)
        if not any(one.name.startswith(n) for one in NOTEBOOKS)
    ]
    missing += [
        m
        for m in re.findall(r"python -m (mint_jax[\w.]*)", text)
        if importlib.util.find_spec(m) is None
    ]
    missing += [c for c in re.findall(r"--config=(\S+?\.py)", text) if not (ROOT / c).is_file()]
    assert not missing


@pytest.mark.long
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")  # one device, as its reader has
    CHECKS[path.stem]("".join(store.texts(store.run(path))).splitlines())
