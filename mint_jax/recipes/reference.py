"""Every setting of a recipe, as ``--help`` lists it; ``python -m mint_jax.recipes.reference >
docs/settings.md`` writes the page of all recipes. Imports no JAX for ``--help``.
"""

import importlib
import shutil
import textwrap
from typing import Any

from mint_jax.harness import settings
from mint_jax.harness.options import RecipeSettings
from mint_jax.recipes import SETTINGS

HEAD = """# Settings

After this page you can find every setting of a job's config, its default and its meaning.
`python -m mint_jax.launch --config=FILE --help` prints them with the values of a config file.

A job has the settings of its own section and those of the first table that name it.
A setting without a default must be given. `(not set)` means that the job decides; the meaning says how.
On the command line, dots join sections: `--config.checkpoint.every=5`.
Settings of benchmarks are in `configs/bench/` and `configs/sweeps/`.

`python -m mint_jax.recipes.reference > docs/settings.md` writes this page.
"""  # noqa: E501
TABLE = "| setting | default | type | meaning |\n| --- | --- | --- | --- |"


def usage(cls: type[RecipeSettings], tree: dict[str, Any]) -> str:
    """Lists every setting with its present value, type and help."""
    width = min(120, shutil.get_terminal_size().columns)
    out = [f"\nsettings of job {tree['job']}:"]
    for path, kind, value, line in settings.describe(cls, tree):
        is_unset = value is None or value is settings.UNSET
        shown = "" if is_unset else value if isinstance(value, str) else repr(value)
        out.append(f"  --config.{path}={shown}")
        about = f"{kind}; {line}" if line else str(kind)
        out += textwrap.wrap(about, width, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(out)


def summary(job: str) -> str:
    """Returns the first paragraph of a recipe's docstring."""
    folder = SETTINGS[job].folder
    doc = importlib.import_module(f"mint_jax.{folder}.{job}").__doc__ or ""
    return doc.split("\n\n")[0].strip().replace("\n", " ")


def page() -> str:
    """Returns the page; ``NAME`` stands for a policy's name. Settings that several jobs have alike
    are in a table of their own.
    """
    jobs: dict[str, list[str]] = {}  # of a row
    for job, cls in SETTINGS.items():
        for path, kind, value, line in settings.describe(cls, {}):
            usual = "(not set)" if value is None else f"`{value!r}`"
            cells = f"`{path}`", "" if value is settings.UNSET else usual, str(kind), line
            row = "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
            jobs.setdefault(row, []).append(job)
    shared = {row: having for row, having in jobs.items() if len(having) > 1}
    head, rule = TABLE.split("\n")
    parts = [HEAD, "## Settings of several jobs", "", f"{head} jobs |", f"{rule} --- |"]
    for row, having in shared.items():
        parts.append(f"{row} {'all' if len(having) == len(SETTINGS) else ', '.join(having)} |")
    for job in SETTINGS:
        own = [row for row, having in jobs.items() if having == [job]]
        parts += ["", f"## {job}", "", summary(job), *(["", TABLE, *own] if own else [])]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    print(page(), end="")
