"""score, sample, import, export and evaluate: whole jobs on a directory, against torch and PEFT."""

import json

import numpy as np
import peft
import pytest
import torch
from ml_collections import ConfigDict

from mint_jax.errors import UserError
from mint_jax.jobs import JOBS, export, import_, sample, score
from tests import oracles

pytestmark = pytest.mark.usefixtures("quick_compiles")

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
        config = peft.LoraConfig(r=rank, lora_alpha=7, target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM")
        folder = tmp_path_factory.mktemp("peft") / f"rank{rank}"
        peft.get_peft_model(oracles.torch_model(hf_dirs("llama")), config).save_pretrained(folder)
        out.append(str(folder))
    return out


def torch_logprobs(directory, adapter, tokens):
    """``log p(tokens[i + 1] | tokens[:i + 1])`` by torch and PEFT."""
    model = oracles.torch_model(directory)
    if adapter:
        model = peft.PeftModel.from_pretrained(model, adapter)
    logits = torch.tensor(oracles.torch_logits(model, np.array([tokens])))[0]
    return torch.log_softmax(logits[:-1], -1).gather(1, torch.tensor(tokens)[1:, None])[:, 0].numpy()


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_score_equals_torch_for_mixed_adapters_and_lengths(hf_dirs, adapters, rng, tmp_path):
    lengths = [1, 9, 3, 40, 2, 17, 9]
    owners = [None, adapters[0], adapters[1], None, adapters[1], adapters[0], None]
    rows = [{"id": f"r{i}", "tokens": rng.integers(0, 97, n).tolist()} for i, n in enumerate(lengths)]
    for row, owner in zip(rows, owners):
        if owner:
            row["adapter"] = owner
    write_lines(tmp_path / "in.jsonl", rows)
    fields = {"base": str(hf_dirs("llama")), "input": str(tmp_path / "in.jsonl"), "output": str(tmp_path / "out.jsonl"), "max_tokens": 64}
    result = score.run(config_of("score", **fields), tmp_path / "work")
    assert result["sequences"] == len(rows)
    out = read_lines(tmp_path / "out.jsonl")
    assert [o["id"] for o in out] == [r["id"] for r in rows]
    for row, owner, o in zip(rows, owners, out):
        assert o["tokens"] == row["tokens"]
        assert o["logprobs"][0] is None
        np.testing.assert_allclose(o["logprobs"][1:], torch_logprobs(hf_dirs("llama"), owner, row["tokens"]), atol=ATOL)


def test_sample_is_greedy_as_torch_and_reports_its_logprobs(hf_dirs, adapters, rng, tmp_path):
    prompts = [rng.integers(3, 97, n).tolist() for n in (4, 11, 6)]
    owners = [adapters[1], None, adapters[0]]
    rows = [{"tokens": p, "n": 1 + i % 2} | ({"adapter": a} if a else {}) for i, (p, a) in enumerate(zip(prompts, owners))]
    write_lines(tmp_path / "in.jsonl", rows)
    fields = {"base": str(hf_dirs("llama")), "input": str(tmp_path / "in.jsonl"), "output": str(tmp_path / "out.jsonl")}
    sampling = {"max_tokens": 6, "temperature": 0.0, "seed": 0}
    sample.run(config_of("sample", **fields, max_rows=8, sampling=sampling), tmp_path / "work")
    for i, (o, prompt, owner) in enumerate(zip(read_lines(tmp_path / "out.jsonl"), prompts, owners)):
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


def test_import_then_export_gives_back_the_peft_adapter(hf_dirs, adapters, rng, tmp_path):
    base, catalog = str(hf_dirs("llama")), str(tmp_path / "catalog")
    for k, source in enumerate(adapters):
        settings = {"base": base, "input": source, "policy": f"team/rank{k}", "catalog": catalog}
        result = import_.run(config_of("import", **settings), tmp_path / "work")
        assert result["name"] == f"team/rank{k}@1"
        target = tmp_path / f"{result['revision'][:8]}"
        settings = {"base": base, "revision": result["name"], "output": str(target), "catalog": catalog}
        assert export.run(config_of("export", **settings), tmp_path / "work")["revision"] == result["revision"]
        tokens = rng.integers(0, 97, (2, 12))
        logits = [oracles.torch_logits(peft.PeftModel.from_pretrained(oracles.torch_model(base), d), tokens) for d in (source, str(target))]
        np.testing.assert_array_equal(*logits)
        # the revision itself scores as the PEFT directory does, by any of its names
        names = (source, result["name"], f"team/rank{k}@latest", f"team/rank{k}", result["revision"], result["revision"][:12])
        write_lines(tmp_path / "in.jsonl", [{"tokens": tokens[0].tolist(), "adapter": a} for a in names])
        fields = {"base": base, "input": str(tmp_path / "in.jsonl"), "output": str(tmp_path / "out.jsonl"), "max_tokens": 64}
        score.run(config_of("score", **fields, catalog=catalog), tmp_path / "work")
        first, *others = read_lines(tmp_path / "out.jsonl")
        for other in others:  # other rows of one batch: sums over D and V in another order, of logits up to 10 (an ulp is 1e-6 there)
            np.testing.assert_allclose(first["logprobs"][1:], other["logprobs"][1:], atol=1e-5)


def test_sampled_tokens_name_their_revision(hf_dirs, adapters, tmp_path):
    base, catalog = str(hf_dirs("llama")), str(tmp_path / "catalog")
    settings = {"base": base, "input": adapters[0], "policy": "p", "catalog": catalog}
    digest = import_.run(config_of("import", **settings), tmp_path / "work")["revision"]
    write_lines(
        tmp_path / "in.jsonl", [{"tokens": [5, 6], "adapter": "p@latest"}, {"tokens": [5, 6]}, {"tokens": [7], "adapter": adapters[0]}]
    )
    fields = {"base": base, "input": str(tmp_path / "in.jsonl"), "output": str(tmp_path / "out.jsonl"), "catalog": catalog}
    sample.run(config_of("sample", **fields, max_rows=8, sampling={"max_tokens": 4, "seed": 1}), tmp_path / "work")
    assert [line["revision"] for line in read_lines(tmp_path / "out.jsonl")] == [digest, None, digest]


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
    settings = {"base": base, "input": adapters[0], "policy": "p", "catalog": str(tmp_path / "here")}
    import_.run(config_of("import", **settings), tmp_path / "work")
    place = str(tmp_path / catalog) if catalog else ""
    with pytest.raises(UserError, match=says):
        export.run(config_of("export", base=base, revision=name, catalog=place, output=str(tmp_path / "out")), tmp_path / "work")
    assert not (tmp_path / "nowhere").exists()


def test_adapter_of_another_base_is_refused(hf_dirs, adapters, tmp_path):
    catalog = str(tmp_path / "catalog")
    settings = {"base": str(hf_dirs("llama")), "input": adapters[0], "policy": "p", "catalog": catalog}
    import_.run(config_of("import", **settings), tmp_path / "work")
    write_lines(tmp_path / "in.jsonl", [{"tokens": [1, 2], "adapter": "p@1"}])
    fields = {"base": str(hf_dirs("llama_bias")), "input": str(tmp_path / "in.jsonl"), "output": str(tmp_path / "o"), "max_tokens": 64}
    with pytest.raises(UserError, match="load its own base"):
        score.run(config_of("score", **fields, catalog=catalog), tmp_path / "work")


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"tokens": [1, "2"]}, "expected a list of token ids"),
        ({"tokens": [1, 97]}, "ids 0 to 96"),
        ({"tokens": [1, -1]}, "ids 0 to 96"),
        ({"tokens": []}, "no tokens"),
        ({"tokens": [1] * 257}, "context of 256"),
        ({"text": "hello"}, "no tokenizer.json"),
        ({"prompt": "hello"}, "expected tokens or text"),
        ({"tokens": [1, 2], "adapter": "nowhere"}, "nowhere"),
    ],
)
def test_score_refuses(row, says, hf_dirs, tmp_path):
    write_lines(tmp_path / "in.jsonl", [row])
    fields = {"base": str(hf_dirs("llama")), "input": str(tmp_path / "in.jsonl"), "output": str(tmp_path / "out.jsonl"), "max_tokens": 64}
    with pytest.raises(UserError, match=says):
        score.run(config_of("score", **fields), tmp_path / "work")
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"temperature": "hot"}, "temperature is 'hot'; expected int or float"),
        ({"temperature": -1}, "temperature >= 0"),
        ({"top_p": 0.0}, "0 < top_p <= 1"),
        ({"n": 0}, "at least 1"),
        ({"max_tokens": 500}, "context of 256"),
        ({"stop": "."}, "need a tokenizer"),
    ],
)
def test_sample_refuses(row, says, hf_dirs, tmp_path):
    write_lines(tmp_path / "in.jsonl", [{"tokens": [1, 2]} | row])
    fields = {"base": str(hf_dirs("llama")), "input": str(tmp_path / "in.jsonl"), "output": str(tmp_path / "out.jsonl")}
    with pytest.raises(UserError, match=says):
        sample.run(config_of("sample", **fields, max_rows=8, sampling={"max_tokens": 4}), tmp_path / "work")


@pytest.mark.parametrize("field", ["input", "output"])
def test_missing_paths_are_named(field, hf_dirs, tmp_path):
    fields = {"base": str(hf_dirs("llama")), "input": "x.jsonl", "output": "y.jsonl", "max_tokens": 64} | {field: ""}
    with pytest.raises(UserError, match=f"--config.{field}="):
        score.run(config_of("score", **fields), tmp_path)


def test_every_job_has_a_module_with_run():
    import importlib

    for module in JOBS.values():
        assert callable(importlib.import_module(module).run)
