"""README and docs name only files that exist, and a newcomer can read the README in one go."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
NAMED = re.compile(r"`((?:configs|tests|mint_jax|notebooks|launch|pallas_kernels)/[\w./*-]*)`")
LINKED = re.compile(r"\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_file_that_a_page_names_exists(page):
    text = page.read_text()
    missing = [name for name in NAMED.findall(text) if not any(ROOT.glob(name.rstrip("/")))]
    missing += [link for link in LINKED.findall(text) if not (page.parent / link).exists()]
    assert not missing


def test_the_readme_is_short():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 150
    assert not [line for line in lines if len(line) > 120 and not line.startswith("|")]
