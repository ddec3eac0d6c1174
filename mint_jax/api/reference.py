"""Reference page of the Python API, made from signatures and docstrings.

``python -m mint_jax.api.reference > docs/api.md`` writes it; a test fails if the file is stale.
"""

import dataclasses
import inspect
import re
from collections.abc import Iterator
from typing import Any

import mint_jax

HEAD = """# Python

This page lists every name of `import mint_jax as mint`: functions, objects and settings, with their arguments and errors.
The README's ten lines train, sample and save a policy; [From Python](jobs.md#from-python) runs whole jobs.

An invalid value raises `mint.UserError`. Its message names the value, the expectation and the remedy.

The page is generated from the docstrings in `mint_jax/`.
"""  # noqa: E501
EXAMPLES = """## Examples

Train several policies in one pass through the base, each with its own rank and loss:

```python
base = mint.load("smollm2-135m-instruct")
base.policy("sums", rank=8, learning_rate=1e-3)
base.policy("taste", rank=4, loss="dpo")
base.train_step({
    "sums": [{"prompt": "2 + 2 =", "completion": " 4"}],
    "taste": [{"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5"}],
})
```

Run one GRPO step by hand, with a reward function:

```python
policy = base.policy("grpo", loss=mint.LossConfig("ppo", kl_kind="k3", kl=0.05))
completions = policy.completions(["2 + 2 =", "3 + 4 ="], n=8, temperature=1.0, max_tokens=8)
rewards = [[float(c.text.strip() == answer) for c in some] for some, answer in zip(completions, "47")]
policy.train_step(mint.groups(completions, rewards))
print(policy.evaluate("digit_sum", examples=20, max_tokens=4))
```

Train on two turns. The environment's text is context and gets no loss:

```python
[[first]] = policy.completions(["2 + 2 ="], temperature=1.0, max_tokens=8)
prompt = [*first.request.prompt, *first.tokens, *base.encode(" Are you sure?")]
[[second]] = policy.completions([prompt], temperature=1.0, max_tokens=8)
groups = mint.groups([[[first, second]]], [[1.0]], baseline="none")
```

Register a loss of your own and use it by name in any config:

```python
import jax.numpy as jnp

mint.register_loss("squashed", lambda t: -jnp.tanh(t.advantages) * t.logp)
base.policy("own", loss="squashed")
```

Save and resume training, and convert to and from PEFT:

```python
base.policies["sums"].save_state("sums.state")    # base.resume("sums.state") continues, in any process
base.policies["sums"].export("sums-peft")         # a PEFT directory
base.policy("again", start="sums-peft")
```
"""  # noqa: E501
FUNCTIONS = (
    "load",
    "open",
    "groups",
    "register_loss",
    "register_environment",
    "config",
    "read_config",
    "run",
)
OBJECTS = ("Model", "Policy", "Evaluation", "Store", "Stored", "Completion")
SETTINGS = (
    "LossConfig",
    "OptimizerConfig",
    "AdapterConfig",
    "PolicyConfig",
    "Request",
    "Tokens",
    "Group",
    "TrainSequence",
)
BELOW = ("Catalog", "Trainer", "Engine", "Scorer", "Example", "ListEnvironment", "UserError")
# public to the other modules of the API only
INTERNAL = {"join", "need_open", "need_trainer", "own_seed", "requests", "generate", "write_peft"}


def page() -> str:
    """Returns the page as Markdown."""
    parts = [HEAD, EXAMPLES]
    for title, names in (
        ("Functions", FUNCTIONS),
        ("Objects", OBJECTS),
        ("Settings and data", SETTINGS),
        ("Below", BELOW),
    ):
        parts.append(f"## {title}\n")
        for name in names:
            parts += _entry(
                name, getattr(mint_jax, name), methods=title == "Objects", below=title == "Below"
            )
    return "\n".join(parts)


def _entry(name: str, thing: Any, methods: bool, below: bool) -> Iterator[str]:
    yield f"### mint.{name}\n"
    if below:
        yield (
            f"`{thing.__module__}.{thing.__qualname__}`."
            f" {inspect.cleandoc(thing.__doc__ or '').partition(chr(10) * 2)[0]}\n"
        )
        return
    if not inspect.isclass(thing) or (dataclasses.is_dataclass(thing) and name in SETTINGS):
        yield f"```python\n{_signature(name, thing)}\n```\n"
    yield _markdown(thing.__doc__)
    if dataclasses.is_dataclass(thing) and name in SETTINGS:
        lines = {f.name: f.metadata["help"] for f in dataclasses.fields(thing) if f.metadata}
        if lines:
            yield "".join(f"- `{field}`: {line}.\n" for field, line in lines.items())
    for method, value in vars(thing).items() if methods else ():
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
    texts, star = [], False
    for p in shown:
        if (
            p.kind is p.KEYWORD_ONLY
            and not star
            and not any(q.kind is q.VAR_POSITIONAL for q in shown)
        ):
            texts.append("*")
            star = True
        texts.append(_short(str(p)))
    returns = ""
    if signature.return_annotation not in (signature.empty, None):
        returns = f" -> {_short(inspect.formatannotation(signature.return_annotation))}"
    line = f"{name}({', '.join(texts)}){returns}"
    return (
        line
        if len(line) <= 100
        else f"{name}(\n" + "".join(f"    {text},\n" for text in texts) + f"){returns}"
    )


def _short(text: str) -> str:
    return re.sub(
        r"<factory>", "...", re.sub(r"\b(?:[a-z_]\w*\.)+([A-Za-z_]\w*)", r"\1", text)
    ).replace("'", '"')


def _markdown(doc: str | None) -> str:
    """Returns a docstring as Markdown: sections become lists, indented code becomes a block."""
    blocks, out = re.split(r"\n\n+", inspect.cleandoc(doc or "")), []
    for block in blocks:
        title, _, rest = block.partition("\n")
        if title in ("Args:", "Attributes:", "Raises:", "Returns:"):
            body = inspect.cleandoc("\n" + rest)
            if title == "Returns:":
                out.append("Returns: " + " ".join(body.split()))
            else:
                items = re.split(r"\n(?! )", body)
                out.append(f"{title}\n\n" + "\n".join("- " + _item(item) for item in items))
        elif block.startswith("    "):
            code = inspect.cleandoc("\n" + block)
            if out and out[-1].endswith("```"):
                out[-1] = f"{out[-1].removesuffix('```')}\n{code}\n```"
            else:
                out.append(f"```python\n{code}\n```")
        else:
            out.append(block)
    return re.sub(r"(?<!`)``(?!`)([^`]+)``(?!`)", r"`\1`", "\n\n".join(out)) + "\n"


def _item(text: str) -> str:
    names, colon, rest = " ".join(text.split()).partition(": ")
    return f"`{names}`: {rest}" if colon else names


if __name__ == "__main__":
    print(page(), end="")
