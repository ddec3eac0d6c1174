"""Reference page of the Python API: its head is written by hand, the rest is made from signatures
and docstrings. ``python -m mint_jax.api.reference docs/api.md`` makes the rest again.
"""

import dataclasses
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mint_jax

SETTINGS = (
    "LossConfig",
    "OptimizerConfig",
    "AdapterConfig",
    "MergeConfig",
    "PolicyConfig",
    "Request",
    "Tokens",
)
SETTINGS = (*SETTINGS, "Group", "TrainSequence")
SECTIONS = {
    "Functions": (
        *("load", "open", "groups", "register_loss", "register_environment"),
        *("config", "read_config", "run"),
    ),
    "Objects": ("Model", "Policy", "Evaluation", "Store", "Stored", "Completion"),
    "Settings and data": SETTINGS,
    "Lower layers": (
        "Catalog",
        "Trainer",
        "Engine",
        "Scorer",
        "Example",
        "ListEnvironment",
        "UserError",
    ),
}
# public to the other modules of the API only
INTERNAL = {"need_open", "need_trainer", "requests", "generate", "write_peft"}


def page(old: str) -> str:
    """Returns the page in Markdown, with the head of the old one."""
    parts = [old.partition("## Functions")[0].rstrip("\n") + "\n"]
    for title, names in SECTIONS.items():
        parts.append(f"## {title}\n")
        for name in names:
            parts += _entry(name, getattr(mint_jax, name), title)
    return "\n".join(parts)


def _entry(name: str, thing: Any, section: str) -> Iterator[str]:
    yield f"### mint.{name}\n"
    if section == "Lower layers":
        about = inspect.cleandoc(thing.__doc__ or "").partition("\n\n")[0]
        yield f"`{thing.__module__}.{thing.__qualname__}`. {_markdown(about)}"
        return
    is_settings = dataclasses.is_dataclass(thing) and name in SETTINGS
    if is_settings or not inspect.isclass(thing):
        yield f"```python\n{_signature(name, thing)}\n```\n"
    yield _markdown(thing.__doc__)
    if is_settings:
        declared = getattr(thing, "__dataclass_fields__", {}).values()
        lines = {f.name: f.metadata["help"] for f in declared if f.metadata}
        if lines:
            yield "".join(f"- `{field}`: {line}.\n" for field, line in lines.items())
    for method, value in vars(thing).items() if section == "Objects" else ():
        if method.startswith("_") or method in INTERNAL:
            continue
        if isinstance(value, property):
            yield f"#### {name}.{method}\n"
            yield _markdown(value.__doc__)
        elif inspect.isfunction(value):
            yield f"#### {name}.{method}\n\n```python\n{_signature(method, value)}\n```\n"
            yield _markdown(value.__doc__)


def _signature(name: str, thing: Any) -> str:
    """Returns a signature with short type names; a long one has one parameter a line."""
    signature = inspect.signature(thing)
    shown = [p for p in signature.parameters.values() if p.name != "self"]
    whole = signature.replace(parameters=shown)
    whole, returns = str(whole.replace(return_annotation=whole.empty)), ""
    if signature.return_annotation not in (signature.empty, None):
        returns = f" -> {_short(inspect.formatannotation(signature.return_annotation))}"
    line = f"{name}{_short(whole)}{returns}"
    if len(line) <= 100:
        return line
    texts, star = [], False
    for p in shown:
        if p.kind is p.KEYWORD_ONLY and not star and "*" not in "".join(texts):
            texts.append("*")
            star = True
        texts.append(_short(str(p)))
    return f"{name}(\n" + "".join(f"    {text},\n" for text in texts) + f"){returns}"


def _short(text: str) -> str:
    text = re.sub(r"\b(?:[a-z_]\w*\.)+([A-Za-z_]\w*)", r"\1", text)
    return text.replace("<factory>", "...").replace("'", '"')


def _markdown(doc: str | None) -> str:
    """Returns a docstring as Markdown: sections become lists, indented code becomes a block."""
    blocks, out = re.split(r"\n\n+", inspect.cleandoc(doc or "")), []
    for block in blocks:
        title, _, rest = block.partition("\n")
        body = inspect.cleandoc("\n" + rest)
        if title == "Returns:":
            out.append("Returns: " + " ".join(body.split()))
        elif title in ("Args:", "Attributes:", "Raises:"):
            items = re.split(r"\n(?! )", body)
            out.append(f"{title}\n\n" + "\n".join("- " + _item(item) for item in items))
        elif not block.startswith("    "):
            out.append(block)
        elif out and out[-1].endswith("```"):
            code = inspect.cleandoc("\n" + block)
            out[-1] = f"{out[-1].removesuffix('```')}\n{code}\n```"
        else:
            out.append("```python\n" + inspect.cleandoc("\n" + block) + "\n```")
    return re.sub(r"(?<!`)``(?!`)([^`]+)``(?!`)", r"`\1`", "\n\n".join(out)) + "\n"


def _item(text: str) -> str:
    names, colon, rest = " ".join(text.split()).partition(": ")
    return f"`{names}`: {rest}" if colon else names


if __name__ == "__main__":
    file = Path(sys.argv[1])
    file.write_text(page(file.read_text()))
