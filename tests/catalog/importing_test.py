"""Import in bulk: exact, resumable after a kill, and strangers' files are refused one by one, each
with its reason.
"""

import dataclasses
import json
import os
from pathlib import Path

import ml_dtypes
import numpy as np
import peft
import pytest
from safetensors.numpy import load_file, save_file

from mint_jax import nested
from mint_jax.catalog.cli.main import main
from mint_jax.catalog.lifecycle import Catalog
from mint_jax.catalog.packed import Schema, pack, unpack
from mint_jax.errors import UserError
from mint_jax.lora import peft as peft_lib
from mint_jax.lora.config import AdapterConfig
from mint_jax.lora.peft import CONFIG, WEIGHTS
from mint_jax.models.outline import outline
from tests import oracles
from tests.catalog import peft_dirs
from tests.catalog.adapters import packed
from tests.catalog.peft_dirs import random_factors, write_adapter
from tests.exchange import edit_config, peft_model


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return peft_dirs.make_base(tmp_path_factory.mktemp("base"))


@pytest.fixture
def run(tmp_path, capsys, base):
    """``run("import", ...)`` -> status, JSON document (None after a mistake), stderr."""

    def call(*argv, base_name: str | None = base.name) -> tuple[int, dict | None, str]:
        capsys.readouterr()
        more = [] if base_name is None else [f"--base={base_name}"]
        code = main([f"--catalog={tmp_path / 'catalog'}", *map(str, argv), "--json", *more])
        out, err = capsys.readouterr()
        return code, json.loads(out) if out else None, err

    return call


@pytest.fixture
def many(tmp_path) -> Path:
    return tmp_path / "many"


def policies(tmp_path) -> dict[str, int]:
    """Names and how many revisions each has."""
    with Catalog.open(tmp_path / "catalog") as catalog:
        return {one.policy: one.revisions for one in catalog.policies(limit=10_000)}


def contents(directory: Path) -> dict:
    """Everything that a PEFT directory says."""
    arrays = load_file(directory / WEIGHTS)
    said = {name: (x.dtype, x.shape, x.tobytes()) for name, x in arrays.items()}
    return said | {"config": json.loads((directory / CONFIG).read_text())}


def refusal(run, *argv, **options) -> str:
    """Why the only source was refused."""
    code, told, _ = run("import", *argv, **options)
    assert code == 1
    assert (told["imported"], told["present"]) == (0, 0)
    (one,) = told["refused"]
    return one["reason"]


def test_import_then_export_gives_the_same_files(run, base, many, tmp_path):
    write_adapter(many / "a", base, 1)
    config = AdapterConfig(5, 3.0, ("o", "down", "embed"), rslora=True)
    write_adapter(many / "b", base, 2, config)
    code, told, err = run("import", many)
    assert (code, told["imported"], told["refused"]) == (0, 2, [])
    assert "import 2 of 2" in err
    for name in "ab":
        code, _, _ = run("export", name, tmp_path / "out" / name)
        assert code == 0
        assert contents(many / name) == contents(tmp_path / "out" / name)
    with Catalog.open(tmp_path / "catalog") as catalog:
        adapter, schema = unpack(catalog.load("b"))
    assert sorted(schema.config.targets) == sorted(config.targets)  # in the base's order
    assert schema == Schema(
        base.fingerprint, dataclasses.replace(config, targets=schema.config.targets)
    )
    for path, value in nested.leaves_with_path(random_factors(base, 2, config)):
        np.testing.assert_array_equal(dict(nested.leaves_with_path(adapter))[path], value)


def test_routed_experts_and_halves_are_exact(run, hf_dirs, many, tmp_path):
    """Experts stay tensors of their own; factors of two scales become float32, others keep their
    dtype.
    """
    moe = outline(str(hf_dirs("qwen3_moe")))
    for name in ("moe", "scaled"):
        file = write_adapter(many / name, moe, 3, AdapterConfig(2, 4.0, ("q", "gate"))) / WEIGHTS
        halves = {key: x.astype(ml_dtypes.bfloat16) for key, x in load_file(file).items()}
        save_file(halves, file)
    edit_config(many / "scaled", alpha_pattern={"model.layers.0.self_attn.q_proj": 4.1})
    assert run("import", many, base_name=moe.name)[1]["imported"] == 2
    with Catalog.open(tmp_path / "catalog") as catalog:
        assert unpack(catalog.load("moe"))[1].dtype == "bfloat16"
        assert unpack(catalog.load("scaled"))[1].dtype == "float32"
    assert run("export", "moe", tmp_path / "out", base_name=moe.name)[0] == 0
    theirs, ours = contents(many / "moe"), contents(tmp_path / "out")
    assert any(".experts.1.gate_proj.lora_A" in name for name in ours)
    assert theirs == ours


def test_packed_files_need_no_base(run, many, tmp_path):
    (many / "below").mkdir(parents=True)
    (many / "one.safetensors").write_bytes(packed(1))
    (many / "below" / "two.safetensors").write_bytes(packed(2))
    (many / "README.md").write_text("ignored")
    assert run("import", many, base_name=None)[1]["imported"] == 2
    with Catalog.open(tmp_path / "catalog") as catalog:
        assert catalog.load("two").tobytes() == packed(2)
    assert "trained on base abababababab" in refusal(run, many / "one.safetensors", "--policy=x")
    (many / "one.safetensors").write_bytes((1 << 63).to_bytes(8, "little") + b"{}")
    assert "claims 9223372036854775808 bytes" in refusal(run, many / "one.safetensors")
    for path, message in ((many / "nothing", "check the path"), (many / "README.md", "is no PEFT")):
        code, _, err = run("import", path)
        assert (code, message in err) == (2, True)


def test_a_second_run_imports_what_is_new_and_a_dry_run_foretells_it(run, base, many, tmp_path):
    for i in range(5):
        write_adapter(many / f"a{i}", base, i)
    code, told, _ = run("import", many, "--dry-run")
    assert (code, told["dry_run"], told["imported"]) == (0, True, 5)
    assert not (tmp_path / "catalog").exists()
    assert run("import", many)[1]["imported"] == 5
    write_adapter(many / "a5", base, 5)
    with Catalog.open(tmp_path / "catalog") as catalog:
        catalog.retire("a1")
        assert len(list(catalog.store.packs())) == 1
    for name, config in (("a0", AdapterConfig(3, 4.0, ("q",))), ("a1", peft_dirs.CONFIG)):
        for file in (WEIGHTS, CONFIG):
            (many / name / file).unlink()
        write_adapter(many / name, base, 70, config)
    foretold, done = (run("import", many, *dry)[1] for dry in (["--dry-run"], []))
    assert foretold == done | {"dry_run": True}
    assert (done["imported"], done["present"]) == (1, 3)
    reasons = {Path(one["path"]).name: one["reason"] for one in done["refused"]}
    assert "has rank 2, the exported adapter has 3" in reasons["a0"]
    assert "is retired" in reasons["a1"]


@pytest.mark.parametrize("value", [np.nan, -np.inf, 1e30])
def test_weights_that_are_not_finite_need_force(run, base, many, value):
    adapter = random_factors(base, 2)
    adapter["dense"]["attn"]["q"]["a"][0, 0, 0] = value
    peft_lib.write_peft(many / "a", adapter, peft_dirs.CONFIG, base.tables[0], base.name)
    if value == 1e30:  # finite, but not in float16
        assert "float16" in refusal(run, many, "--dtype=float16")
        assert run("import", many, "--dtype=bfloat16")[0] == 0
        return
    (many / "b.safetensors").write_bytes(pack(adapter, Schema(base.fingerprint, peft_dirs.CONFIG)))
    for path in (many / "a", many / "b.safetensors"):
        assert "NaN or infinite" in refusal(run, path)
        assert run("import", path, "--force")[1]["imported"] == 1


def test_names_come_from_the_template(run, base, many, tmp_path):
    for folder in "xy":
        write_adapter(many / folder / "best", base, ord(folder))
    code, told, _ = run("import", many)
    assert (code, told["imported"]) == (1, 1)
    assert "is already that of" in told["refused"][0]["reason"]
    options = ("--policy={parent}-{name}", "--tenant=acme", "--step=30", "--by=ann")
    code, told, _ = run("import", many, *options)
    assert (code, told["imported"]) == (0, 2)
    assert policies(tmp_path) == {"best": 1, "acme/x-best": 1, "acme/y-best": 1}
    with Catalog.open(tmp_path / "catalog") as catalog:
        revision = catalog.revision("acme/x-best", 1)
        assert (revision.step, revision.origin) == (30, f"import of {many / 'x' / 'best'}")
        assert catalog.audit("acme/x-best")[-1].actor == "ann"
    for template, message in (("{nmae}", "known are {name} and {parent}"), ("a/b/{name}", "'/'")):
        code, _, err = run("import", many, f"--policy={template}")
        assert code == 2
        assert message in err


def as_pickle(path: Path) -> None:
    (path / WEIGHTS).unlink()
    (path / "adapter_model.bin").write_bytes(b"\x80\x04cos\nsystem\n(S'touch owned'\ntR.")


def as_pipe(path: Path) -> None:
    (path / WEIGHTS).unlink()
    os.mkfifo(path / WEIGHTS)


def as_link(path: Path) -> None:
    secret = path.parent.parent / "elsewhere.safetensors"
    (path / WEIGHTS).rename(secret)
    (path / WEIGHTS).symlink_to(secret)


def with_config(**fields):
    return lambda path: edit_config(path, **fields)


HOSTILE = {
    "pickle": (as_pickle, "adapter_model.bin is a pickle, which can run code when it is read"),
    "named pipe": (as_pipe, "is no regular file"),
    "link": (as_link, "is a symbolic link out of the folder"),
    "no weights": (lambda path: (path / WEIGHTS).unlink(), "cannot be read (No such file"),
    "nested": (lambda path: (path / CONFIG).write_text("[" * 200_000), "nested too deeply"),
    "rank is text": (with_config(r="8"), "r is '8'; expected 1 to 1024"),
    "slow pattern": (with_config(rank_pattern={"(a+)+x": 2}), "is too involved"),
    "other method": (with_config(peft_type="IA3"), "only LORA"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_directories_are_refused_beside_good_ones(run, base, many, tmp_path, kind):
    spoil, message = HOSTILE[kind]
    write_adapter(many / "good", base, 1)
    spoil(write_adapter(many / "bad", base, 2))
    code, told, _ = run("import", many)
    assert code == 1
    assert told["imported"] == 1
    (one,) = told["refused"]
    assert Path(one["path"]).is_relative_to(many / "bad")
    assert message in one["reason"]
    assert policies(tmp_path) == {"good": 1}


def test_links_are_not_followed_out_of_the_folder_nor_in_circles(run, base, many, tmp_path):
    write_adapter(many / "a", base, 1)
    write_adapter(tmp_path / "outside" / "b", base, 2)
    (many / "out").symlink_to(tmp_path / "outside")
    (many / "circle").symlink_to(many)
    (many / "again").symlink_to(many / "a")
    (many / "self").symlink_to(many / "self")
    code, told, _ = run("import", many)
    assert (code, told["imported"]) == (1, 1)
    assert [Path(one["path"]).name for one in told["refused"]] == ["out"]
    assert run("import", many, "--follow-links")[1]["imported"] == 1
    assert policies(tmp_path) == {"a": 1, "b": 1}


def test_another_base_or_none_is_refused(run, base, many, tmp_path, hf_dirs):
    write_adapter(many / "a", base, 1)
    assert "trained on another model" in refusal(run, many, base_name=str(hf_dirs("llama")))
    bare = tmp_path / "config_only"
    bare.mkdir()
    (bare / "config.json").write_bytes((Path(base.name) / "config.json").read_bytes())
    code, _, err = run("import", many, base_name=str(bare))
    assert code == 2
    assert "give the fingerprint too" in err
    fingerprint = f"--fingerprint={base.fingerprint}"
    code, told, _ = run("import", many, fingerprint, base_name=str(bare))
    assert (code, told["imported"]) == (0, 1)
    assert run("export", "a", tmp_path / "out")[0] == 0  # the very base
    for place, options, says in (
        (many / "a" / CONFIG / "below", {}, "cannot be written"),
        (tmp_path / "out2", {"base_name": str(hf_dirs("llama"))}, "give its own base"),
    ):
        code, _, err = run("export", "a", place, **options)
        assert code == 2
        assert says in err
    with pytest.raises(UserError, match="expected 64 hex digits"):
        outline(str(bare), "beef")
    with pytest.raises(UserError, match="a different base"):
        outline(base.name, "0" * 64)


def test_auto_peft_opens_an_export_by_what_it_names(run, hf_dirs, many, tmp_path, monkeypatch):
    directory = hf_dirs("llama")
    write_adapter(many / "a", outline(str(directory)), 1)
    monkeypatch.chdir(directory.parent)
    assert run("import", many, base_name=directory.name)[0] == 0
    assert run("export", "a", tmp_path / "out", base_name=directory.name)[0] == 0
    monkeypatch.chdir(tmp_path)
    model = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out")
    found = oracles.torch_logits(model.eval(), np.array([[1, 2, 3]]))
    wanted = oracles.torch_logits(peft_model(directory, many / "a"), np.array([[1, 2, 3]]))
    # Another attention kernel of torch's sums in another order: in float32 44 ulps of the largest
    # logit were seen on one of many random adapters, four times that is allowed; without the
    # adapter it would be a thousand times as much.
    np.testing.assert_allclose(
        found, wanted, rtol=0, atol=176 * np.finfo(np.float32).eps * np.abs(wanted).max()
    )
    bare = oracles.torch_logits(oracles.torch_model(directory), np.array([[1, 2, 3]]))
    assert np.abs(wanted - bare).max() > 1e-2
