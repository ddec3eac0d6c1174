"""Data and losses of sft and dpo: what rows may be, and that a policy's own loss settings reach its
trainer.
"""

import json
from typing import Any

import pytest

from mint_jax import mesh
from mint_jax.errors import UserError
from mint_jax.harness import start
from mint_jax.harness.start import policy_seed
from mint_jax.models import base as base_lib
from mint_jax.recipes import dpo, sft
from tests.configs import read

JOBS = {"sft": (sft, sft.SFT), "dpo": (dpo, dpo.DPO)}


def config_of(job: str, policy: dict | None = None) -> Any:
    one = {"data": {"env": "digit_sum"}, "adapter": {"rank": 2}} | (policy or {})
    return read({"job": job, "base": "tiny-random", "steps": 1, "policies": {"a": one}})


@pytest.fixture(scope="module")
def base():
    return base_lib.load("tiny-random", mesh.single_device_mesh())


def write(path, rows, blank_at=()):
    lines = [json.dumps(row) for row in rows]
    for at in blank_at:
        lines.insert(at, "")
    path.write_text("\n".join(lines) + "\n")
    return str(path)


GOOD = {
    "sft": {"prompt": "a", "completion": " b"},
    "dpo": {"prompt": "a", "chosen": " b", "rejected": " c"},
}


WRONG = [
    ({"messages": "hi", "chosen": 1, "rejected": 2}, "expected a list of messages"),
    ({"question": "a"}, "has columns question; expected"),
    (
        {"prompt": "a", "completion": " b" * 600, "chosen": " b" * 600, "rejected": " c"},
        "tokens, which exceeds the context of 512",
    ),
]


@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize(("bad", "says"), WRONG, ids=["messages", "columns", "long"])
def test_a_bad_row_is_named_by_its_line(job, bad, says, base, tmp_path, monkeypatch):
    monkeypatch.setattr(start, "open_base", lambda config: base)
    # two empty lines before it: line 15
    file = write(tmp_path / "rows.jsonl", [GOOD[job]] * 12 + [bad], blank_at=(3, 5))
    with pytest.raises(UserError, match=rf"rows\.jsonl:15\b.*{says}"):
        JOBS[job][0].run(config_of(job, {"data": {"path": file}}), tmp_path / "work")


LONG = {
    "sft": {"prompt": "a", "completion": " b" * 600},
    "dpo": {"prompt": "a", "chosen": " b" * 600, "rejected": " c"},
}
NO_ROOM = {
    "sft": {"prompt": "a " * 600, "completion": " b"},
    "dpo": {"prompt": "a " * 600, "chosen": " b", "rejected": " c"},
}


def data_of(job, base, **data):
    config, kind = config_of(job, {"data": data}), JOBS[job][1]
    rows = sft.rows_of(config.policies["a"].data, kind)
    return sft.data_of(config, base, kind, {"a": rows})["a"].train


@pytest.mark.parametrize("job", JOBS)
def test_long_rows_are_cut_or_left_out_where_the_data_says_so(job, base, tmp_path, capsys):
    file = write(tmp_path / "rows.jsonl", [GOOD[job]] * 2 + [LONG[job], NO_ROOM[job], GOOD[job]])
    options = {"path": file, "held_out": 1, "max_tokens": 40}
    whole = data_of(job, base, **options, too_long="drop")
    assert "of 4 rows 0 were cut" in capsys.readouterr().err
    cut = data_of(job, base, **options, too_long="cut")
    assert "of 4 rows 1 were cut to 40 tokens and 1 left out" in capsys.readouterr().err
    assert [cut[0], cut[2]] == whole
    long, full = cut[1], JOBS[job][1].to_group(base, LONG[job], "row", True)
    assert len(long.prefix) + len(long.sequences[0].tokens) == 40
    assert long.prefix == full.prefix
    for short, one in zip(long.sequences, full.sequences, strict=True):
        kept = len(short.tokens)
        assert (short.tokens, short.weights) == (one.tokens[:kept], one.weights[:kept])


def test_a_policy_s_seed_is_of_its_name_and_the_run_s_seed_alone():
    seeds = {policy_seed(run, name) for run in (0, 1, 2**40) for name in ("a", "b", "ab", "étude")}
    assert len(seeds) == 12
    assert policy_seed(0, "a") == 788905869  # the same on every machine and in every release
