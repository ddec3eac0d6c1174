"""score and sample: whole jobs on a directory, against torch and PEFT; import and export between
them.
"""

import errno
import json
import os
import signal
import stat
import types

import numpy as np
import peft
import pytest
import torch
from ml_collections import ConfigDict

from mint_jax.catalog.cli.main import main
from mint_jax.catalog.lifecycle import Catalog
from mint_jax.errors import Interrupted, UserError
from mint_jax.harness import batch
from tests import oracles
from tests.configs import run_config
from tests.rollout import score_test

ATOL = 2e-4  # float32 on both sides, sums of up to 80 terms in another order


def config_of(job: str, **fields) -> ConfigDict:
    one = {"data": 1, "fsdp": 1, "expert": 1, "tensor": 1}
    return ConfigDict({"job": job, "dtype": "float32", "mesh": one} | fields)


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def result_of(hf_dirs, tmp_path):
    """Runs ``score`` or ``sample`` over rows on tiny llama; returns the result."""

    def run(name, rows, **settings):
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        (tmp_path / "in.jsonl").write_text("\n".join([*lines, ""]))
        fields = {"base": str(hf_dirs("llama")), "input": str(tmp_path / "in.jsonl")}
        fields |= {"output": str(tmp_path / "out.jsonl"), **settings}
        return run_config(config_of(name, **fields), tmp_path / "work")

    return run


@pytest.fixture
def job(result_of, tmp_path):
    """Runs the same; returns the lines of the output."""
    return lambda *a, **how: result_of(*a, **how) and read_lines(tmp_path / "out.jsonl")


@pytest.fixture(scope="module")
def adapters(hf_dirs, tmp_path_factory):
    """Two PEFT directories over tiny llama, of ranks 2 and 5, with random B."""
    out = []
    usual = {"lora_alpha": 7, "init_lora_weights": False, "task_type": "CAUSAL_LM"}
    for seed, (rank, targets) in enumerate([(2, ["q_proj", "down_proj"]), (5, "all-linear")]):
        torch.manual_seed(seed)
        config = peft.LoraConfig(r=rank, target_modules=targets, **usual)
        folder = tmp_path_factory.mktemp("peft") / f"rank{rank}"
        peft.get_peft_model(oracles.torch_model(hf_dirs("llama")), config).save_pretrained(folder)
        out.append(str(folder))
    return out


def import_peft(base, source: str, policy: str, catalog) -> str:
    """The digest of the revision that the catalog's command makes of a PEFT directory."""
    command = [f"--catalog={catalog}", "import", source, f"--base={base}", f"--policy={policy}"]
    assert main(command) == 0
    with Catalog.open(catalog) as opened:
        return opened.resolve(policy).digest


def torch_model(directory, adapter):
    model = oracles.torch_model(directory)
    return peft.PeftModel.from_pretrained(model, adapter) if adapter else model


def torch_logprobs(directory, adapter, tokens):
    """``log p(tokens[i + 1] | tokens[:i + 1])`` by torch and PEFT."""
    return score_test.torch_logprobs(torch_model(directory, adapter), tokens)


def test_score_equals_torch_for_mixed_adapters_and_lengths(job, hf_dirs, adapters, rng):
    lengths = [1, 9, 3, 40, 2, 17, 9]
    owners = [None, adapters[0], adapters[1], None, adapters[1], adapters[0], None]
    named = enumerate(zip([rng.integers(0, 97, n).tolist() for n in lengths], owners))
    rows = [{"id": f"r{i}", "tokens": tokens, "adapter": a} for i, (tokens, a) in named]
    out = job("score", rows, max_tokens=64)
    assert [o["id"] for o in out] == [r["id"] for r in rows]
    for row, owner, o in zip(rows, owners, out):
        assert o["tokens"] == row["tokens"]
        assert o["logprobs"][0] is None
        wanted = torch_logprobs(hf_dirs("llama"), owner, row["tokens"])
        np.testing.assert_allclose(o["logprobs"][1:], wanted, atol=ATOL)


def test_sample_is_greedy_as_torch_and_reports_logprobs_and_revisions(
    job, hf_dirs, adapters, rng, tmp_path
):
    digest = import_peft(hf_dirs("llama"), adapters[0], "p", tmp_path / "catalog")
    owners = [adapters[1], None, adapters[0], adapters[0]]
    names = [adapters[1], None, adapters[0], "p@latest"]
    rows = [
        {"tokens": rng.integers(3, 97, n).tolist(), "n": 1 + i % 2, "adapter": name}
        for i, (n, name) in enumerate(zip((4, 11, 6, 2), names))
    ]
    sampling = {"max_tokens": 6, "temperature": 0.0, "seed": 0}
    where = {"catalog": str(tmp_path / "catalog"), "max_rows": 8}
    out = job("sample", rows, **where, sampling=sampling)
    assert [line["revision"] for line in out][1:] == [None, digest, digest]
    for i, (o, row, owner) in enumerate(zip(out, rows, owners)):
        prompt = row["tokens"]
        assert (o["prompt_tokens"], o["id"], len(o["completions"])) == (prompt, i, row["n"])
        for c in o["completions"]:
            tokens = prompt + c["tokens"]
            model = torch_model(hf_dirs("llama"), owner)
            logits = oracles.torch_logits(model, np.array([tokens]))[0, len(prompt) - 1 : -1]
            chosen = logits[np.arange(len(c["tokens"])), c["tokens"]]
            # the argmax, or a tie within tolerance
            assert (logits.max(-1) - chosen <= ATOL).all()
            expected = torch_logprobs(hf_dirs("llama"), owner, tokens)[len(prompt) - 1 :]
            np.testing.assert_allclose(c["logprobs"], expected, atol=ATOL)


@pytest.mark.parametrize(
    ("name", "catalog", "says"),
    [
        ("p@latest", "", "no catalog is given"),
        ("q@latest", "here", "policy 'q' is not in the catalog"),
        ("p@latest", "nowhere", "nowhere does not exist"),
        ("p@1", "here", "load its own base"),
    ],
)
def test_a_name_without_an_adapter_of_this_base_is_refused(
    name, catalog, says, job, hf_dirs, adapters, tmp_path
):
    import_peft(hf_dirs("llama"), adapters[0], "p", tmp_path / "here")
    base = str(hf_dirs("llama_bias" if name == "p@1" else "llama"))
    place = str(tmp_path / catalog) if catalog else ""
    with pytest.raises(UserError, match=says):
        job("score", [{"tokens": [5, 6], "adapter": name}], base=base, catalog=place)
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize(
    ("name", "row", "says"),
    [
        ("score", {"tokens": [1, "2"]}, "expected a list of token ids"),
        ("score", {"tokens": [1, 97]}, "ids 0 to 96"),
        ("score", {"tokens": [1], "adaptor": "x"}, "in.jsonl:3: .*'adaptor', did you mean 'adapt"),
        ("score", {"tokens": [1], "adapter": 5}, "in.jsonl:3: adapter is 5; expected a PEFT"),
        ("score", {"id": 1}, "in.jsonl:3 has id; expected tokens or text"),
        ("sample", {"prompt": "x", "tokens": [1]}, "in.jsonl:3 has prompt and tokens: give one of"),
        ("sample", {"tokens": [1], "temperature": "hot"}, "temperature is 'hot'; expected a num"),
        ("sample", {"tokens": [1], "max_tokens": 500}, "max_tokens 500 exceed the context of 256"),
        ("sample", {"tokens": [1], "logit_bias": {"x": 1}}, "logit_bias has 'x': 1; expected numb"),
    ],
)
def test_a_bad_row_is_named_by_its_line(name, row, says, job):
    settings = {"sampling": {"max_tokens": 4}} if name == "sample" else {}
    with pytest.raises(UserError, match=says):  # line 3, as an editor counts
        job(name, [{"tokens": [1]}, "", row], **settings)


@pytest.fixture(params=["sample", "score"])
def six(request, result_of, rng, tmp_path):
    """``run(rows, **changes)`` of a job over six rows of 16 tokens, two a batch."""
    settings = {"max_tokens": 32}
    if request.param == "sample":
        settings = {"max_rows": 2, "sampling": {"max_tokens": 3, "seed": 1}}
    rows = [{"id": f"r{i}", "tokens": rng.integers(3, 97, 16).tolist()} for i in range(6)]
    output = tmp_path / "out" / "all.jsonl"

    def run(rows=rows, **changes):
        return result_of(request.param, rows, **{"output": str(output)} | settings | changes)

    return types.SimpleNamespace(run=run, name=request.param, rows=rows, output=output)


def interrupt(monkeypatch, error=KeyboardInterrupt):
    """The second batch ends in ``error``, after its rows are written."""

    class Stops(batch.Progress):
        updates = 0

        def update(self, done, detail=""):
            self.updates += 1
            if self.updates == 2:
                raise error

    monkeypatch.setattr(batch, "Progress", Stops)


STOPS = KeyboardInterrupt(), Interrupted("SIGTERM", signal.SIGTERM)


@pytest.mark.parametrize("error", STOPS, ids=["SIGINT", "SIGTERM"])
def test_an_interrupted_job_goes_on_where_it_was(error, six, monkeypatch):
    assert six.run()["resumed"] == 0
    whole = six.output.read_bytes()
    assert [p.name for p in six.output.parent.iterdir()] == ["all.jsonl"]
    six.output.unlink()
    with monkeypatch.context() as patch:
        interrupt(patch, error)
        says = r"4 of 6 rows are in .*all\.jsonl\.part; the same command goes on with the"
        with pytest.raises(Interrupted, match=rf"^{str(error) or 'SIGINT'}; {says}") as caught:
            six.run()
        assert caught.value.number == getattr(error, "number", signal.SIGINT)
    part = six.output.parent / "all.jsonl.part"
    part.write_bytes(part.read_bytes() + b'{"row": 5, "resu')  # as a crash may leave it
    assert not six.output.exists()
    assert six.run()["resumed"] == 4
    assert six.output.read_bytes() == whole
    assert [p.name for p in six.output.parent.iterdir()] == ["all.jsonl"]


def test_a_part_of_other_rows_or_settings_is_refused(six, hf_dirs, monkeypatch):
    with monkeypatch.context() as patch:
        interrupt(patch, RuntimeError)
        with pytest.raises(RuntimeError):
            six.run()
    says = r"\.part holds 4 of 6 rows of a run with base '.*', this one has '.*remove that file"
    with pytest.raises(UserError, match=says):
        six.run(base=str(hf_dirs("llama_bias")))
    if six.name == "sample":
        with pytest.raises(UserError, match=r"with sampling\.max_tokens 3, this one has 4: repeat"):
            six.run(sampling={"max_tokens": 4, "seed": 1})
    with pytest.raises(UserError, match="with input with digest"):
        six.run([{"tokens": [5]}, *six.rows[1:]])
    assert six.run()["resumed"] == 4


def test_a_full_disk_is_one_line_and_loses_nothing_that_was_written(six, monkeypatch):
    synced, real = [], os.fsync

    def full(descriptor):
        synced.extend([descriptor] * stat.S_ISREG(os.fstat(descriptor).st_mode))
        if len(synced) == 4:  # the config; the settings of the rows; one batch; the next
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    says = r"No space left.*: 2 of 6 rows are in .*\.part; the same command goes on"
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(UserError, match=says):
            six.run()
    assert six.run()["resumed"] >= 2
