"""docs/api.md is what the docstrings say, has every name, and its examples run."""

import re
from pathlib import Path

import pytest

import mint_jax as mint
from mint_jax import api, mesh
from mint_jax.api import reference

ROOT = Path(__file__).parents[2]


def test_the_page_is_up_to_date():
    """``python -m mint_jax.api.reference > docs/api.md`` makes it again."""
    assert (ROOT / "docs" / "api.md").read_text() == reference.page()


def test_every_name_of_the_package_is_on_the_page_and_every_entry_has_a_text():
    page = reference.page()
    shown = re.findall(r"^### mint\.(\w+)$", page, re.MULTILINE)
    assert sorted(shown) == sorted(set(mint.__all__) - {"__version__"})
    for entry in re.split(r"^####? ", page.split("## Functions")[1], flags=re.MULTILINE)[1:]:
        text = re.sub(r"```.*?```", "", entry.partition("\n")[2], flags=re.DOTALL)
        assert len(text.split()) >= 3, entry
    assert page.count("```") % 2 == 0


@pytest.mark.long
def test_its_examples_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    load = api.load
    monkeypatch.setattr(
        api, "load", lambda name: load("tiny-random", mesh=mesh.single_device_mesh())
    )
    code = "\n".join(re.findall(r"```python\n(.*?)```", reference.EXAMPLES, re.DOTALL))
    names = {"mint": mint}
    exec(code, names)
    assert (tmp_path / "sums.state").is_file()
    assert (tmp_path / "sums-peft" / "adapter_config.json").is_file()
    assert list(names["base"].policies) == ["sums", "taste", "grpo", "own", "again"]
    assert names["base"].policies["grpo"].steps == 1
