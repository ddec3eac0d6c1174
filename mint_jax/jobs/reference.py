"""Every setting of every job as one page: ``python -m mint_jax.jobs.reference > docs/settings.md``;
a test holds the two equal.
"""

import dataclasses
import importlib
import typing
from collections.abc import Iterator

from ml_collections import ConfigDict

from mint_jax.jobs import JOBS, settings

HEAD = """# Settings

What the config of each job may have; `--config=FILE --help` prints the same with a file's own values. Settings without a default must
be given, `(not set)` means that the job decides. Sections are joined by dots, as on the command line: `--config.checkpoint.every=5`.
Benchmarks declare theirs in `configs/bench/` and `configs/sweeps/`.

Generated from the dataclasses in `mint_jax/jobs/`.
"""  # noqa: E501


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for job, module in JOBS.items():
        cls = settings.settings_of(job)
        if cls is not None:
            about = (
                (importlib.import_module(module).__doc__ or "").split("\n\n")[0].replace("\n", " ")
            )
            parts.append(
                f"## {job}\n\n{about}\n\n| setting | default | type | meaning |\n| --- | --- | ---"
                " | --- |\n" + "\n".join(_rows(cls))
            )
    return "\n".join(parts) + "\n"


def _rows(cls: type) -> Iterator[str]:
    """A table row for every setting; ``NAME`` stands for a policy's name."""
    hints = typing.get_type_hints(cls, include_extras=True)
    named = [
        name
        for name, kind in hints.items()
        if typing.get_origin(kind) is dict and dataclasses.is_dataclass(typing.get_args(kind)[1])
    ]
    config = ConfigDict({name: {"NAME": {}} for name in named})
    settings.fill(cls, config, strict=False)
    required = set(_required(cls))
    for path, words, value, line in settings.describe(cls, config):
        shown = "" if path in required else "(not set)" if value is None else f"`{value!r}`"
        cells = (f"`{path}`", shown, words, line)
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _required(cls: typing.Any, where: str = "") -> Iterator[str]:
    """Paths of settings without a default."""
    hints = typing.get_type_hints(cls, include_extras=True)
    for field in dataclasses.fields(cls):
        kind = hints[field.name]
        if typing.get_origin(kind) is dict and dataclasses.is_dataclass(typing.get_args(kind)[1]):
            yield from _required(typing.get_args(kind)[1], f"{where}{field.name}.NAME.")
        elif dataclasses.is_dataclass(kind):
            yield from _required(kind, f"{where}{field.name}.")
        elif field.default is dataclasses.MISSING:
            yield where + field.name


if __name__ == "__main__":
    print(page(), end="")
