"""Data and losses of sft and dpo: what rows may be, and that a policy's own loss settings reach its
trainer.
"""

import dataclasses
import json
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from mint_jax import mesh
from mint_jax.data.tokenizer import Tokenizer
from mint_jax.errors import UserError
from mint_jax.harness import start
from mint_jax.harness.start import policy_seed
from mint_jax.models import base as base_lib
from mint_jax.recipes import dpo, sft
from mint_jax.train import losses
from mint_jax.train.config import registered
from mint_jax.train.trainer import Trainer
from tests.configs import read, run_config

JOBS = {"sft": (sft, sft.SFT), "dpo": (dpo, dpo.DPO)}


def config_of(job: str, policy: dict | None = None) -> Any:
    one = {"data": {"env": "digit_sum"}, "adapter": {"rank": 2}} | (policy or {})
    return read({"job": job, "base": "tiny-random", "steps": 1, "policies": {"a": one}})


@pytest.fixture(scope="module")
def base():
    return base_lib.load("tiny-random", mesh.single_device_mesh())


def test_a_registered_loss_is_one_of_the_jobs_that_can_feed_it(monkeypatch):
    for name in ("focal", "of_rewards"):
        monkeypatch.setitem(registered, name, None)  # and away again
    losses.register_loss("focal", lambda t: -((1 - jnp.exp(t.logp)) ** 2) * t.logp)
    losses.register_loss("of_rewards", lambda t: -t.advantages * t.logp)
    assert config_of("sft", {"loss": {"kind": "focal"}}).policies["a"].loss.kind == "focal"
    grpo = {"env": {"name": "digit_sum"}, "adapter": {"rank": 2}}

    def of_rollouts(kind):
        one = grpo | {"loss": {"kind": kind}}
        return read({"job": "grpo", "base": "tiny-random", "steps": 1, "policies": {"a": one}})

    assert of_rollouts("of_rewards").policies["a"].loss.kind == "of_rewards"
    for refused in (
        lambda: config_of("sft", {"loss": {"kind": "of_rewards"}}),
        lambda: config_of("dpo", {"loss": {"kind": "focal"}}),
    ):
        with pytest.raises(UserError, match=r"but job (sft|dpo) minimises"):
            refused()
    for kind in ("focal", "cross_entropy", "dpo"):
        with pytest.raises(UserError, match=f"loss.kind is '{kind}', which does not use rewards"):
            of_rollouts(kind)


@pytest.mark.parametrize("job", JOBS)
def test_a_policys_own_loss_settings_are_honoured(job, base, tmp_path, monkeypatch):
    class Made(Exception):
        pass

    def made(base, policies, *args):
        raise Made(policies)

    monkeypatch.setattr(start, "open_base", lambda config: base)
    monkeypatch.setattr(sft, "Trainer", made)
    loss = {"kl_kind": "k3", "kl": 0.25, "dpo_beta": 0.4}
    with pytest.raises(Made) as caught:
        JOBS[job][0].run(config_of(job, {"loss": loss}), tmp_path)
    [policy] = caught.value.args[0]
    assert policy.loss.kind == {"sft": "cross_entropy", "dpo": "dpo"}[job]
    assert {name: getattr(policy.loss, name) for name in loss} == loss


@pytest.mark.long
def test_kl_of_sft_keeps_the_policy_near(base):
    """The same examples with and without KL: the gradient differs, and the metric is there."""
    config = config_of("sft")
    data = {"a": sft.rows_of(config.policies["a"].data, sft.SFT)}
    [student] = sft.data_of(config, base, sft.SFT, data).values()
    groups = sft.weighted(student.train[:2])
    norms = {}
    for kl in (0.0, 5.0):
        own = config_of(
            "sft", {"loss": {"kl_kind": "k3", "kl": kl}, "optimizer": {"learning_rate": 0.1}}
        )
        trainer = Trainer(base, [start.policy_config("a", own.policies["a"], 0)])
        rows = [trainer.update({"a": groups})["a"] for _ in range(2)]
        assert ("kl" in rows[1]) == (kl > 0)
        norms[kl] = rows[1]["grad_norm"]
    assert abs(norms[0.0] - norms[5.0]) > 1e-3 * norms[0.0]


@pytest.mark.parametrize("job", JOBS)
def test_answers_of_an_environment_end_with_the_end_token(job, base):
    kind = JOBS[job][1]
    tokenizer: Tokenizer = base.need_tokenizer()

    def last_tokens(append_eos):
        config = config_of(job, {"data": {"env": "digit_sum", "append_eos": append_eos}})
        data = {"a": sft.rows_of(config.policies["a"].data, kind)}
        [student] = sft.data_of(config, base, kind, data).values()
        return [s.tokens for g in student.train + student.held_out for s in g.sequences]

    whole, bare = last_tokens(True), last_tokens(False)
    assert whole == [[*tokens, tokenizer.eos_id] for tokens in bare]
    assert not any(tokens[-1] in tokenizer.eos_ids for tokens in bare)


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


@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"messages": "hi", "chosen": 1, "rejected": 2}, "expected a list of messages"),
        (
            {"prompt": 5, "completion": " b", "chosen": " b", "rejected": " c"},
            "prompt is '5'; expected a list of messages",
        ),
        (
            {"prompt": "a", "completion": 5, "chosen": 5, "rejected": " c"},
            "is '5'; expected a string",
        ),
        ({"question": "a"}, "has columns question; expected"),
        (
            {"prompt": "a", "completion": " b" * 600, "chosen": " b" * 600, "rejected": " c"},
            "tokens, which exceeds the context of 512",
        ),
    ],
    ids=["messages", "prompt", "reply", "columns", "long"],
)
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
    config = config_of(job, {"data": data})
    kind = JOBS[job][1]
    return sft.data_of(config, base, kind, {"a": sft.rows_of(config.policies["a"].data, kind)})[
        "a"
    ].train


@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize("limit", [0, 40])
def test_long_rows_are_cut_or_left_out_where_the_data_says_so(job, limit, base, tmp_path, capsys):
    file = write(tmp_path / "rows.jsonl", [GOOD[job]] * 2 + [LONG[job], NO_ROOM[job], GOOD[job]])
    options = {"path": file, "held_out": 1} | ({"max_tokens": limit} if limit else {})
    whole = data_of(job, base, **options, too_long="drop")
    assert "of 4 rows 0 were cut" in capsys.readouterr().err
    assert len(whole) == 2
    cut = data_of(job, base, **options, too_long="cut")
    assert (
        f"of 4 rows 1 were cut to {limit or base.cfg.context} tokens and 1 left out"
        in capsys.readouterr().err
    )
    assert [dataclasses.asdict(group) for group in (cut[0], cut[2])] == [
        dataclasses.asdict(group) for group in whole
    ]
    long = cut[1]
    assert len(long.prefix) + len(long.sequences[0].tokens) == (limit or base.cfg.context)
    full = JOBS[job][1].to_group(base, LONG[job], "row", True)
    assert long.prefix == full.prefix
    for short, one in zip(long.sequences, full.sequences, strict=True):
        assert (short.tokens, short.weights) == (
            one.tokens[: len(short.tokens)],
            one.weights[: len(short.tokens)],
        )


def test_how_long_rows_may_be_is_checked_first(base, tmp_path):
    file = write(tmp_path / "rows.jsonl", [GOOD["sft"]] * 4)
    with pytest.raises(UserError, match="too_long is 'trim'; choose one of: refuse, cut, drop"):
        data_of("sft", base, path=file, too_long="trim")
    with pytest.raises(UserError, match=r"data.max_tokens is 513, but the base's context is 512"):
        data_of("sft", base, path=file, max_tokens=513)
    with pytest.raises(
        UserError, match=r"exceeds data.max_tokens, 1: shorten it, or set data.too_long"
    ):
        data_of("sft", base, path=file, max_tokens=1)
    with pytest.raises(UserError, match=r"rows have more than 1 tokens: raise data.max_tokens"):
        data_of("sft", base, path=file, max_tokens=1, too_long="cut")


def test_columns_that_nobody_reads_are_named(tmp_path, capsys):
    file = write(tmp_path / "rows.jsonl", [GOOD["sft"] | {"mesages": [], "id": 3}] * 4)
    section = config_of("sft", {"data": {"path": file}}).policies["a"].data
    assert [len(part) for part in sft.rows_of(section, sft.SFT)] == [3, 1]
    assert "rows.jsonl: columns mesages, id are not used" in capsys.readouterr().err


def test_a_missing_file_is_refused_before_the_base_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(start, "open_base", lambda config: pytest.fail("loaded"))
    with pytest.raises(UserError, match=r"policies.a.data: there is neither path nor env"):
        config_of("sft", {"data": {}})
    with pytest.raises(UserError, match="does not exist"):
        run_config(
            config_of("sft", {"data": {"path": str(tmp_path / "none.jsonl")}}), tmp_path / "work"
        )
    assert not (tmp_path / "work").exists()
    with pytest.raises(UserError, match=r"data\.size is no setting of a file"):
        run_config(config_of("sft", {"data": {"path": "none.jsonl", "size": 3}}), tmp_path / "work")


def test_measured_margins_are_of_the_reference_that_trains(base):
    """A fresh policy is its own reference: margins are 0."""
    config = config_of("dpo")
    data = {"a": sft.rows_of(config.policies["a"].data, dpo.DPO)}
    students = sft.data_of(config, base, dpo.DPO, data)
    students["a"].held_out = students["a"].held_out[:2]
    trainer = Trainer(base, [start.policy_config("a", config.policies["a"], 0)])
    assert np.allclose(dpo.measure(trainer, students)["a"]["margin"], 0.0, atol=1e-5)


def test_a_policy_s_seed_is_of_its_name_and_the_run_s_seed_alone():
    names = ["a", "b", "ab", "policy", "étude"]
    seeds = {(run, name): policy_seed(run, name) for run in (0, 1, 2**40) for name in names}
    assert len(set(seeds.values())) == len(seeds)
    assert all(0 <= s < 2**32 for s in seeds.values())
    assert seeds[0, "a"] == 788905869  # the same on every machine and in every release
    with pytest.raises(UserError, match="seed is -1; expected a whole number >= 0"):
        policy_seed(-1, "a")
