"""Data and losses of sft and dpo: what rows may be, and that a policy's own loss settings reach its
trainer.
"""

import json
from typing import Any

import numpy as np
import pytest

from mint_jax import mesh
from mint_jax.catalog.lifecycle import Catalog
from mint_jax.catalog.packed import Schema
from mint_jax.catalog.rollouts import Rollouts, pack_rollouts
from mint_jax.errors import UserError
from mint_jax.harness import start
from mint_jax.harness.start import policy_seed
from mint_jax.lora.tree import AdapterConfig
from mint_jax.models import base as base_lib
from mint_jax.recipes import dpo, sft, stored
from tests.configs import read, run_config
from tests.groups import rows_of

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


# for both jobs: further columns are not used
GOOD = {"prompt": "a", "completion": " b", "chosen": " b", "rejected": " c"}
LONG = {"prompt": "a", "completion": " b" * 600, "chosen": " b" * 600, "rejected": " c"}
NO_ROOM = {"prompt": "a " * 600, "completion": " b", "chosen": " b", "rejected": " c"}
WRONG = [
    ({"messages": "hi", "chosen": 1, "rejected": 2}, "expected a list of messages"),
    ({"question": "a"}, "has columns question; expected"),
    (LONG, "tokens, which exceeds the context of 512"),
]


@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize(("bad", "says"), WRONG, ids=["messages", "columns", "long"])
def test_a_bad_row_is_named_by_its_line(job, bad, says, base, tmp_path, monkeypatch):
    monkeypatch.setattr(start, "open_base", lambda config: base)
    # two empty lines before it: line 15
    file = write(tmp_path / "rows.jsonl", [GOOD] * 12 + [bad], blank_at=(3, 5))
    with pytest.raises(UserError, match=rf"rows\.jsonl:15\b.*{says}"):
        JOBS[job][0].run(config_of(job, {"data": {"path": file}}), tmp_path / "work")


def data_of(job, base, **data):
    config, kind = config_of(job, {"data": data}), JOBS[job][1]
    rows = sft.rows_of(config.policies["a"].data, kind)
    return sft.data_of(config, base, kind, {"a": rows})["a"].train


@pytest.mark.parametrize("job", JOBS)
def test_long_rows_are_cut_or_left_out_where_the_data_says_so(job, base, tmp_path, capsys):
    file = write(tmp_path / "rows.jsonl", [GOOD] * 2 + [LONG, NO_ROOM, GOOD])
    options = {"path": file, "held_out": 1, "max_tokens": 40}
    whole = data_of(job, base, **options, too_long="drop")
    assert "of 4 rows 0 were cut" in capsys.readouterr().err
    cut = data_of(job, base, **options, too_long="cut")
    assert "of 4 rows 1 were cut to 40 tokens and 1 left out" in capsys.readouterr().err
    assert [cut[0], cut[2]] == whole
    long, full = cut[1], JOBS[job][1].to_group(base, LONG, "row", True)
    assert len(long.prefix) + len(long.sequences[0].tokens) == 40
    assert long.prefix == full.prefix
    for short, one in zip(long.sequences, full.sequences, strict=True):
        kept = len(short.tokens)
        assert (short.tokens, short.weights) == (one.tokens[:kept], one.weights[:kept])


@pytest.fixture
def store(base, rng, tmp_path):
    """Returns a function that stores rollouts of a policy, and returns them as they were drawn."""
    with Catalog.open(tmp_path / "catalog") as catalog:
        for name, own in (("teacher", base.fingerprint), ("other", "ab" * 32), ("new", "")):
            schema = Schema(own or base.fingerprint, AdapterConfig(1, 2.0, ("q",)))
            catalog.create_policy(name, schema)

        def put(policy, step, rewards, nobody=0):
            lengths = rng.integers(1, 7, np.shape(rewards))
            tokens = [[rng.integers(3, 90, n).tolist() for n in row] for row in lengths]
            prompts = [rng.integers(3, 90, 4).tolist() for _ in rewards]
            drawn = [[[[x] * n for n in row] for row in lengths] for x in (-1.0, "cd" * 32)]
            for row in (row for group in drawn[1] for row in group):
                row[:nobody] = [""] * min(nobody, len(row))
            made = Rollouts(policy, step, prompts, tokens, *drawn, np.array(rewards))
            about: Any = {"tokens": int(lengths.sum()), "mean_reward": 0.0}
            catalog.rollout(policy, step, pack_rollouts(made), **about)
            return [(p, t) for p, group in zip(prompts, tokens) for t in group]

        yield put


def stored_config(tmp_path, rollouts, **data):
    config = {"job": "sft", "base": "tiny-random", "steps": 2, "catalog": str(tmp_path / "catalog")}
    policy = {"data": {"rollouts": rollouts} | data, "adapter": {"rank": 2}, "batch_size": 5}
    policy["optimizer"] = {"learning_rate": 0.01}
    return read(config | {"policies": {"student": policy}})


def test_stored_rollouts_are_examples_token_for_token(store, base, tmp_path):
    first, later = store("teacher", 3, [[0.1, 0.9], [0.5, 0.9]]), store("teacher", 5, [[0.2, 0.3]])

    def examples(folder, rollouts, **data):
        (tmp_path / folder).mkdir(exist_ok=True)
        config = stored_config(tmp_path, rollouts, **data)
        groups = [group for _, group in stored.read(config, base, tmp_path / folder)["student"]]
        assert all(s.weights == [1.0] * len(s.tokens) for g in groups for s in g.sequences)
        return [(g.prefix, s.tokens) for g in groups for s in g.sequences]

    assert examples("a", ("teacher",)) == first + later
    assert examples("b", ("teacher@4-5", "teacher@3")) == later + first
    assert examples("c", ("teacher",), min_reward=0.5) == first[1:]
    run_config(stored_config(tmp_path, ("teacher",)), tmp_path / "run")
    before, after = (row["loss"] for row in rows_of(tmp_path / "run"))  # of the same five examples
    assert after < before
    store("teacher", 6, [[1.0]])
    assert examples("run", ("teacher",)) == first + later, "a resumed run has what it began with"
    assert examples("d", ("teacher@5",)) == later


def test_an_environment_s_tokens_and_rows_without_a_reward_are_not_learned(store, base, tmp_path):
    drawn = store("teacher", 3, [[0.1, float("nan")]], nobody=1)
    [(_, group)] = stored.read(stored_config(tmp_path, ("teacher",)), base, tmp_path)["student"]
    [one] = group.sequences
    assert (group.prefix, one.tokens) == drawn[0]
    assert one.weights == [0.0] + [1.0] * (len(one.tokens) - 1)


@pytest.mark.parametrize(
    ("rollouts", "data", "says"),
    [
        (("nobody",), {}, "nobody"),
        (("teacher@latest",), {}, "has 'teacher@latest'; expected a policy, or its steps"),
        (("other",), {}, "'other' is of base abababababab, this run's is .*choose the same base"),
        (("new",), {}, "has 'new', of which the catalog has no rollouts.*rollouts list"),
        (("teacher@4",), {}, "has 'teacher@4', of which the catalog has no rollouts"),
        (("teacher",), {"min_reward": 2.0}, "none of 2 .* at least 2.0, the highest is 1.0: lower"),
        (("teacher",), {"held_out": 2}, "held_out is 2 but data.rollouts has 2 rows"),
        (("teacher",), {"env": "digit_sum"}, "expected one of path .*, env .* and rollouts"),
        ((), {"env": "digit_sum", "min_reward": 1.0}, "only rollouts have rewards"),
    ],
)
def test_bad_sources_of_rollouts_are_refused(rollouts, data, says, store, tmp_path):
    store("teacher", 3, [[0.0, 1.0]])
    with pytest.raises(UserError, match=says):
        run_config(stored_config(tmp_path, rollouts, **data), tmp_path / "run")


def test_a_policy_s_seed_is_of_its_name_and_the_run_s_seed_alone():
    seeds = {policy_seed(run, name) for run in (0, 1, 2**40) for name in ("a", "b", "ab", "étude")}
    assert len(seeds) == 12
    assert policy_seed(0, "a") == 788905869  # the same on every machine and in every release
