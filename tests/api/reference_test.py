"""docs/api.md is what the docstrings say, has every name, and its examples run."""

import re
from pathlib import Path

import pytest

import mint_jax as mint
from mint_jax import api, mesh
from mint_jax.api import reference

PAGE = (Path(__file__).parents[2] / "docs" / "api.md").read_text()


def test_the_page_is_up_to_date_and_has_every_name():
    """``python -m mint_jax.api.reference docs/api.md`` makes it again."""
    assert reference.page(PAGE) == PAGE
    shown = re.findall(r"^### mint\.(\w+)$", PAGE, re.MULTILINE)
    assert sorted(shown) == sorted(set(mint.__all__) - {"__version__"})


@pytest.mark.long
def test_its_examples_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    load = api.load
    monkeypatch.setattr(
        api, "load", lambda name: load("tiny-random", mesh=mesh.single_device_mesh())
    )
    head = PAGE.partition("## Functions")[0]
    names = {"mint": mint}
    exec("\n".join(re.findall(r"```python\n(.*?)```", head, re.DOTALL)), names)
    assert (tmp_path / "sums.state").is_file()
    assert (tmp_path / "sums-peft" / "adapter_config.json").is_file()
    assert list(names["base"].policies) == ["sums", "taste", "grpo", "own", "again"]
    assert names["base"].policies["grpo"].steps == 1
