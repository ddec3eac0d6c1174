"""score and sample: whole jobs on a directory, against torch and PEFT; import and export between
them.
"""

import errno
import json
import os
import re
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
from mint_jax.recipes import RECIPES, sample, score
from pallas_kernels import dispatch
from tests import oracles
from tests.configs import read, run_config

ATOL = 2e-4  # float32 on both sides, sums of up to 80 terms in another order


def config_of(job: str, **fields) -> ConfigDict:
    one = {"data": 1, "fsdp": 1, "expert": 1, "tensor": 1}
    return ConfigDict({"job": job, "dtype": "float32", "mesh": one} | fields)


@pytest.fixture(scope="module")
def adapters(hf_dirs, tmp_path_factory):
    """Two PEFT directories over tiny llama, of ranks 2 and 5, with random B."""
    out = []
    for seed, (rank, targets) in enumerate([(2, ["q_proj", "down_proj"]), (5, "all-linear")]):
        torch.manual_seed(seed)
        config = peft.LoraConfig(
            r=rank,
            lora_alpha=7,
            target_modules=targets,
            init_lora_weights=False,
            task_type="CAUSAL_LM",
        )
        folder = tmp_path_factory.mktemp("peft") / f"rank{rank}"
        peft.get_peft_model(oracles.torch_model(hf_dirs("llama")), config).save_pretrained(folder)
        out.append(str(folder))
    return out


def import_peft(base: str, source: str, policy: str, catalog: str) -> str:
    """The digest of the revision that the catalog's command makes of a PEFT directory."""
    assert (
        main([f"--catalog={catalog}", "import", source, f"--base={base}", f"--policy={policy}"])
        == 0
    )
    with Catalog.open(catalog) as opened:
        return opened.resolve(policy).digest


def torch_logprobs(directory, adapter, tokens):
    """``log p(tokens[i + 1] | tokens[:i + 1])`` by torch and PEFT."""
    model = oracles.torch_model(directory)
    if adapter:
        model = peft.PeftModel.from_pretrained(model, adapter)
    logits = torch.tensor(oracles.torch_logits(model, np.array([tokens])))[0]
    return (
        torch.log_softmax(logits[:-1], -1).gather(1, torch.tensor(tokens)[1:, None])[:, 0].numpy()
    )


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.long
def test_a_result_tells_which_kernels_of_its_machine_were_passed_over(
    hf_dirs, tmp_path, monkeypatch
):
    """On a CPU none is wanted; as on a TPU: its kernel of attention to pages reads none that are as
    narrow as a CPU's.
    """
    write_lines(tmp_path / "in.jsonl", [{"tokens": [1, 2, 3]}])
    told = {}
    for platform in ("cpu", "tpu"):
        jax.clear_caches()  # what other tests have traced would not be asked about again
        monkeypatch.setattr(dispatch, "platform_here", lambda platform=platform: platform)
        fields = {
            "input": str(tmp_path / "in.jsonl"),
            "output": str(tmp_path / f"{platform}.jsonl"),
            "sampling": {"max_tokens": 2},
        }
        config = config_of("sample", base=str(hf_dirs("llama")), **fields)
        made = launch.run(read(config), tmp_path / platform)
        told[platform] = made["kernels_passed_over"]
        assert (
            json.loads((tmp_path / platform / "result.json").read_text())["kernels_passed_over"]
            == told[platform]
        )
    assert told["cpu"] == []
    (of_pages,) = (one for one in told["tpu"] if one["op"] == "paged_attention")
    assert of_pages["implementation"] == "pallas_tpu"
    assert "is not a multiple of 128" in of_pages["reason"]
    assert of_pages["times"] > 0


def test_score_equals_torch_for_mixed_adapters_and_lengths(hf_dirs, adapters, rng, tmp_path):
    lengths = [1, 9, 3, 40, 2, 17, 9]
    owners = [None, adapters[0], adapters[1], None, adapters[1], adapters[0], None]
    rows = [
        {"id": f"r{i}", "tokens": rng.integers(0, 97, n).tolist()} for i, n in enumerate(lengths)
    ]
    for row, owner in zip(rows, owners):
        if owner:
            row["adapter"] = owner
    write_lines(tmp_path / "in.jsonl", rows)
    fields = {
        "base": str(hf_dirs("llama")),
        "input": str(tmp_path / "in.jsonl"),
        "output": str(tmp_path / "out.jsonl"),
        "max_tokens": 64,
    }
    result = run_config(config_of("score", **fields), tmp_path / "work")
    assert result["sequences"] == len(rows)
    out = read_lines(tmp_path / "out.jsonl")
    assert [o["id"] for o in out] == [r["id"] for r in rows]
    for row, owner, o in zip(rows, owners, out):
        assert o["tokens"] == row["tokens"]
        assert o["logprobs"][0] is None
        np.testing.assert_allclose(
            o["logprobs"][1:], torch_logprobs(hf_dirs("llama"), owner, row["tokens"]), atol=ATOL
        )


def test_sample_is_greedy_as_torch_and_reports_its_logprobs(hf_dirs, adapters, rng, tmp_path):
    prompts = [rng.integers(3, 97, n).tolist() for n in (4, 11, 6)]
    owners = [adapters[1], None, adapters[0]]
    rows = [
        {"tokens": p, "n": 1 + i % 2} | ({"adapter": a} if a else {})
        for i, (p, a) in enumerate(zip(prompts, owners))
    ]
    write_lines(tmp_path / "in.jsonl", rows)
    fields = {
        "base": str(hf_dirs("llama")),
        "input": str(tmp_path / "in.jsonl"),
        "output": str(tmp_path / "out.jsonl"),
    }
    sampling = {"max_tokens": 6, "temperature": 0.0, "seed": 0}
    run_config(config_of("sample", **fields, max_rows=8, sampling=sampling), tmp_path / "work")
    for i, (o, prompt, owner) in enumerate(
        zip(read_lines(tmp_path / "out.jsonl"), prompts, owners)
    ):
        assert o["prompt_tokens"] == prompt
        assert o["id"] == i
        assert len(o["completions"]) == rows[i]["n"]
        for c in o["completions"]:
            tokens = prompt + c["tokens"]
            model = oracles.torch_model(hf_dirs("llama"))
            model = peft.PeftModel.from_pretrained(model, owner) if owner else model
            logits = oracles.torch_logits(model, np.array([tokens]))[0, len(prompt) - 1 : -1]
            best = np.sort(logits, axis=-1)
            chosen = logits[np.arange(len(c["tokens"])), c["tokens"]]
            assert (best[:, -1] - chosen <= ATOL).all()  # the argmax, or a tie within tolerance
            expected = torch_logprobs(hf_dirs("llama"), owner, tokens)[len(prompt) - 1 :]
            np.testing.assert_allclose(c["logprobs"], expected, atol=ATOL)


def test_a_lines_penalties_biases_and_ends_are_its_own(hf_dirs, rng, tmp_path):
    """Greedy: a bias chooses, a penalty forbids a second time, an end token ends where it is not
    ignored.
    """
    prompt = rng.integers(3, 97, 5).tolist()
    rows = [
        {"tokens": prompt, "logit_bias": {"17": 1000}},
        {"tokens": prompt, "logit_bias": {"17": 1000, "18": 900.0}, "presence_penalty": 500},
        {"tokens": prompt, "top_logprobs": 2},
        {
            "tokens": prompt,
            "prompt_logprobs": True,
            "prompt_logprobs_last_n": 2,
            "target_prompt_logprobs": [[], [5, -1], prompt[3:4], [6]],
        }
        | {"prompt_alternatives": 3},
        {"tokens": prompt, "logit_bias": {"17": -1000}},
    ]
    write_lines(tmp_path / "in.jsonl", rows)
    fields = {
        "base": str(hf_dirs("llama")),
        "input": str(tmp_path / "in.jsonl"),
        "output": str(tmp_path / "out.jsonl"),
    }
    run_config(
        config_of("sample", **fields, max_rows=8, sampling={"max_tokens": 3, "temperature": 0.0}),
        tmp_path / "work",
    )
    told = read_lines(tmp_path / "out.jsonl")
    made = [o["completions"][0] for o in told]
    first, second, plain, again, without = [one["tokens"] for one in made]
    assert ["top_logprobs" in one for one in made] == [False, False, True, False, False]
    assert again == plain
    own, targets, drawn = (
        told[3][name]
        for name in ("prompt_logprobs", "target_prompt_logprobs", "prompt_alternatives")
    )
    assert [p is None for p in own] == [True, True, False, False]
    assert targets == [[], [], [own[2]], targets[3]]
    assert [len(x) for x in (*drawn, targets[3])] == [0, 0, 3, 3, 1]
    # greedy: the likeliest
    assert [told[0] for told in made[2]["top_logprobs"]] == [
        [t, p] for t, p in zip(plain, made[2]["logprobs"])
    ]
    assert first == [17, 17, 17]
    assert second == [17, 18, 17]  # by 500 less once it was there, both in the end
    assert 17 not in without
    base = types.SimpleNamespace(tokenizer=types.SimpleNamespace(eos_ids=(2, 9)))
    assert sample.request_of(base, rows[2], {}, "line 1").stop_ids == (2, 9)
    assert sample.request_of(
        base, rows[2] | {"ignore_eos": True, "stop_ids": [5]}, {}, "line 1"
    ).stop_ids == (5,)
    for wrong, says in (
        ({"logit_bias": {"x": 1}}, "line 1: logit_bias has 'x': 1; expected numbers by token id"),
        ({"logit_bias": {"1": "a"}}, "logit_bias has '1': 'a'"),
        ({"ignore_eos": 1}, "ignore_eos is 1; expected True or False"),
        (
            {"target_prompt_logprobs": [5]},
            "target_prompt_logprobs is 5; expected a list or tuple",
        ),
        ({"presence_penalty": True}, "presence_penalty is True; expected a number"),
    ):
        with pytest.raises(UserError, match=re.escape(says)):
            sample.request_of(base, rows[2] | wrong, {}, "line 1")


def test_import_then_export_gives_back_the_peft_adapter(hf_dirs, adapters, rng, tmp_path):
    base, catalog = str(hf_dirs("llama")), str(tmp_path / "catalog")
    for k, source in enumerate(adapters):
        name, target = f"team/rank{k}@1", tmp_path / f"rank{k}"
        digest = import_peft(base, source, f"team/rank{k}", catalog)
        assert main([f"--catalog={catalog}", "export", name, str(target), f"--base={base}"]) == 0
        tokens = rng.integers(0, 97, (2, 12))
        logits = [
            oracles.torch_logits(
                peft.PeftModel.from_pretrained(oracles.torch_model(base), d), tokens
            )
            for d in (source, str(target))
        ]
        np.testing.assert_array_equal(*logits)
        # the revision itself scores as the PEFT directory does, by any of its names
        names = (source, name, f"team/rank{k}@latest", f"team/rank{k}", digest, digest[:12])
        write_lines(
            tmp_path / "in.jsonl", [{"tokens": tokens[0].tolist(), "adapter": a} for a in names]
        )
        fields = {
            "base": base,
            "input": str(tmp_path / "in.jsonl"),
            "output": str(tmp_path / "out.jsonl"),
            "max_tokens": 64,
        }
        run_config(config_of("score", **fields, catalog=catalog), tmp_path / "work")
        first, *others = read_lines(tmp_path / "out.jsonl")
        # other rows of one batch: sums over D and V in another order, of logits up to 10 (an ulp is
        # 1e-6 there)
        for other in others:
            np.testing.assert_allclose(first["logprobs"][1:], other["logprobs"][1:], atol=1e-5)


def test_sampled_tokens_name_their_revision(hf_dirs, adapters, tmp_path):
    base, catalog = str(hf_dirs("llama")), str(tmp_path / "catalog")
    digest = import_peft(base, adapters[0], "p", catalog)
    write_lines(
        tmp_path / "in.jsonl",
        [
            {"tokens": [5, 6], "adapter": "p@latest"},
            {"tokens": [5, 6]},
            {"tokens": [7], "adapter": adapters[0]},
        ],
    )
    fields = {
        "base": base,
        "input": str(tmp_path / "in.jsonl"),
        "output": str(tmp_path / "out.jsonl"),
        "catalog": catalog,
    }
    run_config(
        config_of("sample", **fields, max_rows=8, sampling={"max_tokens": 4, "seed": 1}),
        tmp_path / "work",
    )
    assert [line["revision"] for line in read_lines(tmp_path / "out.jsonl")] == [
        digest,
        None,
        digest,
    ]


@pytest.mark.parametrize(
    ("name", "catalog", "says"),
    [
        ("p@latest", "", "no catalog is given"),
        ("nowhere", "", "no PEFT directory"),
        ("q@latest", "here", "policy 'q' is not in the catalog"),
        ("p@7", "here", "has no revision 7"),
        ("ab" * 32, "here", "is not in the catalog"),
        ("p@latest", "nowhere", "nowhere does not exist"),
    ],
)
def test_an_unknown_name_is_refused(name, catalog, says, hf_dirs, adapters, tmp_path):
    base = str(hf_dirs("llama"))
    import_peft(base, adapters[0], "p", str(tmp_path / "here"))
    write_lines(tmp_path / "in.jsonl", [{"tokens": [5, 6], "adapter": name}])
    fields = {
        "base": base,
        "catalog": str(tmp_path / catalog) if catalog else "",
        "input": str(tmp_path / "in.jsonl"),
    }
    with pytest.raises(UserError, match=says):
        run_config(config_of("score", **fields, output=str(tmp_path / "out")), tmp_path / "work")
    assert not (tmp_path / "nowhere").exists()


def test_adapter_of_another_base_is_refused(hf_dirs, adapters, tmp_path):
    catalog = str(tmp_path / "catalog")
    import_peft(str(hf_dirs("llama")), adapters[0], "p", catalog)
    write_lines(tmp_path / "in.jsonl", [{"tokens": [1, 2], "adapter": "p@1"}])
    fields = {
        "base": str(hf_dirs("llama_bias")),
        "input": str(tmp_path / "in.jsonl"),
        "output": str(tmp_path / "o"),
        "max_tokens": 64,
    }
    with pytest.raises(UserError, match="load its own base"):
        run_config(config_of("score", **fields, catalog=catalog), tmp_path / "work")


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"tokens": [1, "2"]}, "expected a list of token ids"),
        ({"tokens": [1, 97]}, "ids 0 to 96"),
        ({"tokens": [1, -1]}, "ids 0 to 96"),
        ({"tokens": []}, "no tokens"),
        ({"tokens": [1] * 257}, "context of 256"),
        ({"text": "hello"}, "no tokenizer.json"),
        ({"text": 5}, "in.jsonl:3: text is 5; expected a string"),
        ({"id": 1}, "in.jsonl:3 has id; expected tokens or text"),
        ({"prompt": "hello"}, "in.jsonl:3 has 'prompt', which means nothing"),
        (
            {"tokens": [1, 2], "adaptor": "x"},
            "in.jsonl:3 has 'adaptor', which means nothing; 'adapter'[?]",
        ),
        ({"tokens": [1, 2], "adapter": 5}, "in.jsonl:3: adapter is 5; expected a PEFT directory"),
        ({"tokens": [1, 2], "adapter": "nowhere"}, "nowhere"),
    ],
)
def test_score_refuses(row, says, hf_dirs, tmp_path):
    # line 3, as an editor counts
    (tmp_path / "in.jsonl").write_text('{"tokens": [1]}\n\n' + json.dumps(row) + "\n")
    fields = {
        "base": str(hf_dirs("llama")),
        "input": str(tmp_path / "in.jsonl"),
        "output": str(tmp_path / "out.jsonl"),
        "max_tokens": 64,
    }
    with pytest.raises(UserError, match=says):
        run_config(config_of("score", **fields), tmp_path / "work")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.jsonl", "work"]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"temperature": "hot"}, "temperature is 'hot'; expected a number"),
        ({"temperature": -1}, "in.jsonl:3: temperature is -1.*; expected 0 <= temperature"),
        ({"top_p": 0.0}, r"top_p is 0.0; expected 0 < top_p <= 1"),
        ({"n": 0}, "at least 1"),
        ({"tools": []}, "in.jsonl:3 has tools and plain text"),
        (
            {"max_tokens": 500},
            "in.jsonl:3: a prompt of 2 tokens and max_tokens 500 exceed the context of 256",
        ),
        ({"stop": "."}, "in.jsonl:3: stop strings .* need a tokenizer"),
        ({"stop": [5]}, "in.jsonl:3: stop is 5; expected text"),
        ({"stop_ids": ["a"]}, "in.jsonl:3: stop_ids is 'a'; expected a whole number"),
        ({"adapter": 5}, "in.jsonl:3: adapter is 5; expected a PEFT directory"),
        ({"seed": -1}, "in.jsonl:3: seed is -1; expected 0 to"),
        ({"seed": 1.5}, "in.jsonl:3: seed is 1.5; expected a whole number"),
        ({"temprature": 1}, "in.jsonl:3 has 'temprature', which means nothing; 'temperature'[?]"),
        ({"prompt": "x"}, "in.jsonl:3 has prompt and tokens: give one of them"),
        (
            {"tokens": None, "prompt": 5},
            "in.jsonl:3: prompt is 5; expected a string; a conversation is called messages",
        ),
        (
            {"tokens": None, "messages": "hi"},
            "in.jsonl:3: messages is 'hi'; expected a list of .* plain text is called prompt",
        ),
        (
            {"tokens": None, "messages": [{"content": "hi"}]},
            "in.jsonl:3: messages is .* expected a list of",
        ),
        ({"tokens": None}, "in.jsonl:3 has nothing; expected tokens or text"),
    ],
)
def test_sample_refuses(row, says, hf_dirs, tmp_path):
    row = {name: value for name, value in ({"tokens": [1, 2]} | row).items() if value is not None}
    # line 3, as an editor counts
    (tmp_path / "in.jsonl").write_text('{"tokens": [1]}\n\n' + json.dumps(row) + "\n")
    fields = {
        "base": str(hf_dirs("llama")),
        "input": str(tmp_path / "in.jsonl"),
        "output": str(tmp_path / "out.jsonl"),
    }
    with pytest.raises(UserError, match=says):
        run_config(
            config_of("sample", **fields, max_rows=8, sampling={"max_tokens": 4}), tmp_path / "work"
        )


JOB_OF = {
    "sample": (sample, {"max_rows": 2, "sampling": {"max_tokens": 3, "seed": 1}}),
    "score": (score, {"max_tokens": 32}),
}


@pytest.fixture(params=["sample", "score"])
def job(request, hf_dirs, rng, tmp_path):
    """``run(**changes)`` of a job over six rows of 16 tokens, two a batch; its input is
    ``rows``.
    """
    module, settings = JOB_OF[request.param]
    fields = {
        "base": str(hf_dirs("llama")),
        "input": str(tmp_path / "in.jsonl"),
        "output": str(tmp_path / "out" / "all.jsonl"),
    }
    rows = [{"id": f"r{i}", "tokens": rng.integers(3, 97, 16).tolist()} for i in range(6)]
    write_lines(tmp_path / "in.jsonl", rows)

    def run(**changes):
        return run_config(
            config_of(request.param, **fields | settings | changes), tmp_path / "work"
        )

    return types.SimpleNamespace(
        run=run, module=module, rows=rows, output=tmp_path / "out" / "all.jsonl", settings=settings
    )


def interrupt(monkeypatch, job, error=KeyboardInterrupt):
    """The second batch ends in ``error``, after its rows are written."""

    class Stops(batch.Progress):
        seen = 0

        def update(self, done, detail=""):
            self.seen += 1
            if self.seen == 2:
                raise error

    monkeypatch.setattr(batch, "Progress", Stops)


@pytest.mark.parametrize(
    "error",
    [KeyboardInterrupt(), Interrupted("SIGTERM", signal.SIGTERM)],
    ids=["SIGINT", "SIGTERM"],
)
def test_an_interrupted_job_goes_on_where_it_was(error, job, monkeypatch):
    assert job.run()["resumed"] == 0
    whole = job.output.read_bytes()
    assert [p.name for p in job.output.parent.iterdir()] == ["all.jsonl"]
    job.output.unlink()
    with monkeypatch.context() as patch:
        interrupt(patch, job, error)
        says = r"4 of 6 rows are in .*all\.jsonl\.part; the same command goes on with the"
        with pytest.raises(Interrupted, match=rf"^{str(error) or 'SIGINT'}; {says}") as told:
            job.run()
        assert told.value.number == getattr(error, "number", signal.SIGINT)
    part = job.output.parent / "all.jsonl.part"
    part.write_bytes(part.read_bytes() + b'{"row": 5, "resu')  # as a crash may leave it
    assert not job.output.exists()
    assert job.run()["resumed"] == 4
    assert job.output.read_bytes() == whole
    assert [p.name for p in job.output.parent.iterdir()] == ["all.jsonl"]


def test_an_output_that_is_being_written_is_left_alone(tmp_path):
    path = tmp_path / "out.jsonl"
    with Output(path, 2, {"input": "a"}) as first:
        first.add({0: {"x": 1}})
        with pytest.raises(
            UserError,
            match=r"output .*out\.jsonl is being written by another process: wait until it ends",
        ):
            Output(path, 2, {"input": "a"})
    with Output(path, 2, {"input": "a"}) as second:  # which has ended, with a row done
        assert second.rows == {0: {"x": 1}}


def test_a_part_of_other_rows_or_settings_is_refused(job, hf_dirs, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        interrupt(patch, job, RuntimeError)
        with pytest.raises(RuntimeError):
            job.run()
    with pytest.raises(
        UserError,
        match=(
            r"all\.jsonl\.part holds 4 of 6 rows of a run with base '.*', this one has '.*remove"
            r" that file"
        ),
    ):
        job.run(base=str(hf_dirs("llama_bias")))
    if job.module is sample:
        with pytest.raises(
            UserError, match=r"with sampling\.max_tokens 3, this one has 4: repeat the former"
        ):
            job.run(sampling={"max_tokens": 4, "seed": 1})
    write_lines(tmp_path / "in.jsonl", [{"tokens": [5]}, *job.rows[1:]])
    with pytest.raises(UserError, match="with input with digest"):
        job.run()
    write_lines(tmp_path / "in.jsonl", job.rows)
    assert job.run()["resumed"] == 4


def test_a_name_that_means_another_revision_by_now_is_refused(
    hf_dirs, adapters, tmp_path, monkeypatch
):
    base, catalog = str(hf_dirs("llama")), str(tmp_path / "catalog")
    write_lines(tmp_path / "in.jsonl", [{"tokens": [5, 6], "adapter": "p@latest"}] * 3)
    fields = {
        "base": base,
        "catalog": catalog,
        "input": str(tmp_path / "in.jsonl"),
        "output": str(tmp_path / "out"),
        "max_tokens": 2,
    }
    import_peft(base, adapters[0], "p", catalog)
    for kind, says in (
        (Interrupted, "2 of 3 rows are"),
        (UserError, r"2 of 3 rows of a run with adapter p@latest '[0-9a-f]{64}'"),
    ):
        with monkeypatch.context() as patch:
            interrupt(patch, types.SimpleNamespace(module=score))
            with pytest.raises(kind, match=says):
                run_config(config_of("score", **fields), tmp_path / "work")
        with Catalog.open(tmp_path / "catalog") as opened:
            adapter, schema = unpack(opened.load("p"))
            opened.export("p", pack(jax.tree.map(np.negative, adapter), schema), 1)


def test_an_output_that_cannot_be_written_is_found_before_any_work(job, tmp_path, monkeypatch):
    monkeypatch.setattr(start, "open_base", lambda config: pytest.fail("the base was loaded"))
    for place, says in (
        (tmp_path / "in.jsonl" / "out", "Not a directory|File exists"),
        (tmp_path, "is a folder"),
    ):
        with pytest.raises(
            UserError, match=rf"output .* cannot be written .*({says}).*choose another path"
        ):
            job.run(output=str(place))


def test_a_full_disk_is_one_line_and_loses_nothing_that_was_written(job, monkeypatch):
    synced, real = [], os.fsync

    def full(descriptor):
        synced.extend([descriptor] * stat.S_ISREG(os.fstat(descriptor).st_mode))
        if len(synced) == 5:  # the config; what it is made from, twice; one batch; the next
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(
            UserError,
            match=(
                r"cannot be written .*No space left.*: 2 of 6 rows are in .*\.part; the same"
                r" command goes on"
            ),
        ):
            job.run()
    assert job.run()["resumed"] >= 2


@pytest.mark.parametrize("field", ["input", "output"])
def test_missing_paths_are_named(field, hf_dirs, tmp_path):
    fields = {
        "base": str(hf_dirs("llama")),
        "input": "x.jsonl",
        "output": "y.jsonl",
        "max_tokens": 64,
    } | {field: ""}
    with pytest.raises(UserError, match=f"--config.{field}="):
        run_config(config_of("score", **fields), tmp_path)


def test_every_job_has_a_module_with_run():
    import importlib

    for module in RECIPES.values():
        assert callable(importlib.import_module(module).run)


def test_a_cache_that_cannot_hold_a_line_says_how_to_have_more(hf_dirs, rng, tmp_path):
    write_lines(tmp_path / "in.jsonl", [{"tokens": rng.integers(3, 97, 100).tolist()}])
    fields = {
        "base": str(hf_dirs("llama")),
        "input": str(tmp_path / "in.jsonl"),
        "output": str(tmp_path / "out.jsonl"),
    }
    with pytest.raises(
        UserError,
        match=(
            r":1: a prompt of 100 tokens with 64 new ones needs 6 pages, the cache has"
            r" .*cache_gib"
        ),
    ):
        run_config(config_of("sample", **fields, cache_gib=0.0001), tmp_path / "work")
    with pytest.raises(UserError, match="cache_gib is -1"):
        run_config(config_of("sample", **fields, cache_gib=-1.0), tmp_path / "other")
