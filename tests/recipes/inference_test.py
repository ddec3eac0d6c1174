"""score and sample: whole jobs on a directory, against torch and PEFT; import and export between
them.
"""

import errno
import json
import os
import signal
import stat
import types

import jax
import numpy as np
import peft
import pytest
import torch
from ml_collections import ConfigDict

from mint_jax import launch
from mint_jax.catalog.cli.main import main
from mint_jax.catalog.lifecycle import Catalog
from mint_jax.catalog.packed import pack, unpack
from mint_jax.errors import Interrupted, UserError
from mint_jax.harness import batch, start
from mint_jax.harness.batch import Output
from mint_jax.recipes import sample
from pallas_kernels import dispatch
from tests import oracles
from tests.configs import read, run_config

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
    """The same; returns the lines of the output."""

    def run(name, rows, **settings):
        result_of(name, rows, **settings)
        return read_lines(tmp_path / "out.jsonl")

    return run


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


def torch_logits(directory, adapter, tokens):
    """Logits ``[T, V]`` of one sequence by torch and PEFT."""
    model = oracles.torch_model(directory)
    model = peft.PeftModel.from_pretrained(model, adapter) if adapter else model
    return torch.tensor(oracles.torch_logits(model, np.array([tokens])))[0]


def torch_logprobs(directory, adapter, tokens):
    """``log p(tokens[i + 1] | tokens[:i + 1])`` by torch and PEFT."""
    logprobs = torch.log_softmax(torch_logits(directory, adapter, tokens)[:-1], -1)
    return logprobs.gather(1, torch.tensor(tokens)[1:, None])[:, 0].numpy()


@pytest.mark.long
def test_a_result_names_the_kernels_of_its_machine_that_were_passed_over(
    hf_dirs, tmp_path, monkeypatch
):
    """A CPU wants none; as on a TPU: its kernel of attention to pages reads none that are as narrow
    as a CPU's.
    """
    write_lines(tmp_path / "in.jsonl", [{"tokens": [1, 2, 3]}])
    found = {}
    for platform in ("cpu", "tpu"):
        jax.clear_caches()  # programs that other tests have traced do not report again
        monkeypatch.setattr(dispatch, "platform_here", lambda platform=platform: platform)
        files = {"input": str(tmp_path / "in.jsonl"), "output": str(tmp_path / f"{platform}.jsonl")}
        config = config_of(
            "sample", base=str(hf_dirs("llama")), **files, sampling={"max_tokens": 2}
        )
        made = launch.run(read(config), tmp_path / platform)
        found[platform] = made["kernels_passed_over"]
        saved = json.loads((tmp_path / platform / "result.json").read_text())
        assert saved["kernels_passed_over"] == found[platform]
    assert found["cpu"] == []
    (of_pages,) = (one for one in found["tpu"] if one["op"] == "paged_attention")
    assert of_pages["implementation"] == "pallas_tpu"
    assert "is not a multiple of 128" in of_pages["reason"]
    assert of_pages["times"] > 0


def test_score_equals_torch_for_mixed_adapters_and_lengths(job, hf_dirs, adapters, rng):
    lengths = [1, 9, 3, 40, 2, 17, 9]
    owners = [None, adapters[0], adapters[1], None, adapters[1], adapters[0], None]
    rows = [
        {"id": f"r{i}", "tokens": rng.integers(0, 97, n).tolist()} | ({"adapter": a} if a else {})
        for i, (n, a) in enumerate(zip(lengths, owners))
    ]
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
        {"tokens": rng.integers(3, 97, n).tolist(), "n": 1 + i % 2}
        | ({"adapter": name} if name else {})
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
            logits = torch_logits(hf_dirs("llama"), owner, tokens)[len(prompt) - 1 : -1].numpy()
            chosen = logits[np.arange(len(c["tokens"])), c["tokens"]]
            # the argmax, or a tie within tolerance
            assert (logits.max(-1) - chosen <= ATOL).all()
            expected = torch_logprobs(hf_dirs("llama"), owner, tokens)[len(prompt) - 1 :]
            np.testing.assert_allclose(c["logprobs"], expected, atol=ATOL)


def test_a_lines_penalties_biases_and_ends_are_its_own(job, rng):
    """Greedy: a bias chooses, a penalty forbids a second time, an end token ends where it is not
    ignored.
    """
    prompt = rng.integers(3, 97, 5).tolist()
    of_prompt = {"prompt_logprobs": True, "prompt_logprobs_last_n": 2, "prompt_alternatives": 3}
    of_prompt["target_prompt_logprobs"] = [[], [5, -1], prompt[3:4], [6]]
    settings = [
        {"logit_bias": {"17": 1000}},
        {"logit_bias": {"17": 1000, "18": 900.0}, "presence_penalty": 500},
        {"top_logprobs": 2},
        of_prompt,
        {"logit_bias": {"17": -1000}},
    ]
    rows = [{"tokens": prompt} | one for one in settings]
    out = job("sample", rows, max_rows=8, sampling={"max_tokens": 3, "temperature": 0.0})
    made = [o["completions"][0] for o in out]
    first, second, plain, again, without = [one["tokens"] for one in made]
    assert ["top_logprobs" in one for one in made] == [False, False, True, False, False]
    assert again == plain
    own, targets, drawn = (
        out[3][name]
        for name in ("prompt_logprobs", "target_prompt_logprobs", "prompt_alternatives")
    )
    assert [p is None for p in own] == [True, True, False, False]
    assert targets == [[], [], [own[2]], targets[3]]
    assert [len(x) for x in (*drawn, targets[3])] == [0, 0, 3, 3, 1]
    likeliest = [[t, p] for t, p in zip(plain, made[2]["logprobs"])]
    assert [top[0] for top in made[2]["top_logprobs"]] == likeliest
    assert first == [17, 17, 17]
    assert second == [17, 18, 17]  # 500 less once it was drawn
    assert 17 not in without
    base = types.SimpleNamespace(tokenizer=types.SimpleNamespace(eos_ids=(2, 9)))
    assert sample.request_of(base, rows[2], {}, "line 1").stop_ids == (2, 9)
    ignored = rows[2] | {"ignore_eos": True, "stop_ids": [5]}
    assert sample.request_of(base, ignored, {}, "line 1").stop_ids == (5,)


def test_import_then_export_gives_back_the_peft_adapter(job, hf_dirs, adapters, rng, tmp_path):
    base, catalog = str(hf_dirs("llama")), str(tmp_path / "catalog")
    for k, source in enumerate(adapters):
        name, target = f"team/rank{k}@1", tmp_path / f"rank{k}"
        digest = import_peft(base, source, f"team/rank{k}", catalog)
        assert main([f"--catalog={catalog}", "export", name, str(target), f"--base={base}"]) == 0
        tokens = rng.integers(0, 97, 12).tolist()
        logits = [torch_logits(base, d, tokens).numpy() for d in (source, str(target))]
        np.testing.assert_array_equal(*logits)
        # the revision itself scores as the PEFT directory does, by any of its names
        names = (source, name, f"team/rank{k}@latest", f"team/rank{k}", digest, digest[:12])
        rows = [{"tokens": tokens, "adapter": a} for a in names]
        first, *others = job("score", rows, catalog=catalog, max_tokens=64)
        # other rows of one batch: sums over D and V in another order, of logits up to 10 (an ulp is
        # 1e-6 there)
        for other in others:
            np.testing.assert_allclose(first["logprobs"][1:], other["logprobs"][1:], atol=1e-5)


@pytest.mark.parametrize(
    ("name", "catalog", "says"),
    [
        ("p@latest", "", "no catalog is given"),
        ("nowhere", "", "no PEFT directory"),
        ("q@latest", "here", "policy 'q' is not in the catalog"),
        ("p@7", "here", "has no revision 7"),
        ("ab" * 32, "here", "is not in the catalog"),
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


REFUSED_BY_BOTH = [
    ({"tokens": [1, "2"]}, "expected a list of token ids"),
    ({"tokens": [1, 97]}, "ids 0 to 96"),
    (
        {"tokens": [1, 2], "adaptor": "x"},
        "in.jsonl:3 has 'adaptor', which means nothing; 'adapter'",
    ),
    ({"tokens": [1, 2], "adapter": 5}, "in.jsonl:3: adapter is 5; expected a PEFT directory"),
    ({"text": "hello"}, "no tokenizer.json"),
    ({"text": 5}, "in.jsonl:3: text is 5; expected a string"),
]
REFUSED_BY_SCORE = [
    ({"tokens": []}, "no tokens"),
    ({"tokens": [1] * 257}, "context of 256"),
    ({"id": 1}, "in.jsonl:3 has id; expected tokens or text"),
    ({"prompt": "hello"}, "in.jsonl:3 has 'prompt', which means nothing"),
]
REFUSED_BY_SAMPLE = [
    ({"prompt": "x", "tokens": [1]}, "in.jsonl:3 has prompt and tokens: give one of them"),
    (
        {"prompt": 5},
        "in.jsonl:3: prompt is 5; expected a string; a conversation is called messages",
    ),
    ({"messages": "hi"}, "messages is 'hi'; expected a list of .* plain text is called prompt"),
    ({"messages": [{"content": "hi"}]}, "in.jsonl:3: messages is .* expected a list of"),
    ({}, "in.jsonl:3 has nothing; expected tokens or text"),
    *(
        ({"tokens": [1, 2]} | wrong, f"in.jsonl:3.*{says}")
        for wrong, says in (
            ({"temperature": "hot"}, "temperature is 'hot'; expected a number"),
            ({"temperature": -1}, "temperature is -1.*; expected 0 <= temperature"),
            ({"n": 0}, "at least 1"),
            ({"tools": []}, "has tools and plain text"),
            ({"max_tokens": 500}, "2 tokens and max_tokens 500 exceed the context of 256"),
            ({"stop": "."}, "stop strings .* need a tokenizer"),
            ({"stop": [5]}, "stop is 5; expected text"),
            ({"seed": 1.5}, "seed is 1.5; expected a whole number"),
            ({"ignore_eos": 1}, "ignore_eos is 1; expected True or False"),
            ({"logit_bias": {"x": 1}}, "logit_bias has 'x': 1; expected numbers by token id"),
            ({"target_prompt_logprobs": [5]}, "is 5; expected a list or tuple"),
            ({"temprature": 1}, "has 'temprature', which means nothing; 'temperature'[?]"),
        )
    ),
]


@pytest.mark.parametrize(
    ("name", "row", "says"),
    [
        *(("score", *one) for one in REFUSED_BY_BOTH + REFUSED_BY_SCORE),
        *(("sample", *one) for one in REFUSED_BY_BOTH + REFUSED_BY_SAMPLE),
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


@pytest.mark.parametrize(
    "error",
    [KeyboardInterrupt(), Interrupted("SIGTERM", signal.SIGTERM)],
    ids=["SIGINT", "SIGTERM"],
)
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


def test_an_output_that_is_being_written_is_left_alone(tmp_path):
    path = tmp_path / "out.jsonl"
    with Output(path, 2, {"input": "a"}) as first:
        first.add({0: {"x": 1}})
        with pytest.raises(UserError, match=r"out\.jsonl is being written by another process"):
            Output(path, 2, {"input": "a"})
    with Output(path, 2, {"input": "a"}) as second:  # the first has ended, with one row
        assert second.rows == {0: {"x": 1}}


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


def test_a_name_that_has_moved_to_another_revision_is_refused(
    job, hf_dirs, adapters, tmp_path, monkeypatch
):
    catalog = str(tmp_path / "catalog")
    import_peft(hf_dirs("llama"), adapters[0], "p", catalog)
    rows = [{"tokens": [5, 6], "adapter": "p@latest"}] * 3
    for kind, says in (
        (Interrupted, "2 of 3 rows are"),
        (UserError, r"2 of 3 rows of a run with adapter p@latest '[0-9a-f]{64}'"),
    ):
        with monkeypatch.context() as patch:
            interrupt(patch)
            with pytest.raises(kind, match=says):
                job("score", rows, catalog=catalog, max_tokens=2)
        with Catalog.open(catalog) as opened:
            adapter, schema = unpack(opened.load("p"))
            opened.export("p", pack(jax.tree.map(np.negative, adapter), schema), 1)


def test_files_that_cannot_be_used_are_named_before_any_work(six, tmp_path, monkeypatch):
    monkeypatch.setattr(start, "open_base", lambda config: pytest.fail("the base was loaded"))
    for place, says in (
        (tmp_path / "in.jsonl" / "out", "Not a directory|File exists"),
        (tmp_path, "is a folder"),
    ):
        with pytest.raises(UserError, match=rf"output .* cannot be written .*({says}).*another"):
            six.run(output=str(place))
    for field in ("input", "output"):
        with pytest.raises(UserError, match=f"--config.{field}="):
            six.run(**{field: ""})


def test_a_full_disk_is_one_line_and_loses_nothing_that_was_written(six, monkeypatch):
    synced, real = [], os.fsync

    def full(descriptor):
        synced.extend([descriptor] * stat.S_ISREG(os.fstat(descriptor).st_mode))
        if len(synced) == 5:  # the config; the settings of the rows, twice; one batch; the next
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    says = r"No space left.*: 2 of 6 rows are in .*\.part; the same command goes on"
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(UserError, match=says):
            six.run()
    assert six.run()["resumed"] >= 2


def test_a_cache_that_cannot_hold_a_line_names_the_setting(job, rng):
    rows = [{"tokens": rng.integers(3, 97, 100).tolist()}]
    says = r":1: a prompt of 100 tokens with 64 new ones needs 6 pages, the cache has .*cache_gib"
    with pytest.raises(UserError, match=says):
        job("sample", rows, cache_gib=0.0001)
    with pytest.raises(UserError, match="cache_gib is -1"):
        job("sample", rows, cache_gib=-1.0)
