"""Chat templates of a checkpoint, located and rendered as in transformers, in sandboxed jinja2."""

import datetime
import json
import re
import secrets
from pathlib import Path
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import TemplateError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mint_jax.errors import UserError

Span = tuple[int, int]  # first character, one past the last
# random marks around replies, which no text contains
BEGIN, END = (f"\N{NULL}{secrets.token_hex(16)}" for _ in range(2))


def read_templates(directory: Path, config: dict[str, Any]) -> dict[str, str]:
    """Returns the text of each template by name; the usual one is ``default``.

    Files (``chat_template.jinja``, ``additional_chat_templates/NAME.jinja``) take precedence over
    ``chat_template`` in ``tokenizer_config.json``, which is a text, a list of names and texts, or a
    mapping.
    """
    files = {"default": directory / "chat_template.jinja"}
    for path in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        files[path.stem] = path
    found = {name: path.read_text("utf-8") for name, path in files.items() if path.is_file()}
    given: Any = config.get("chat_template")
    if found or given is None:
        return found
    try:
        if isinstance(given, list):
            given = {one["name"]: one["template"] for one in given}
        templates: dict[str, Any] = given if isinstance(given, dict) else {"default": given}
    except (TypeError, KeyError):
        templates = {"default": None}
    if not all(isinstance(text, str) for text in templates.values()):
        raise UserError(
            f"chat_template in {directory / 'tokenizer_config.json'} must be text or named texts:"
            " fetch it again"
        )
    return templates


class Template:
    """A compiled template. Raises ``UserError``: the source is not valid jinja."""

    def __init__(self, source: str):
        self._marks = re.search(r"{%[-+]?\s*generation\s*[-+]?%}", source) is not None
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            where = f"line {error.lineno}: {error.message}"
            raise UserError(
                f"the chat template is not valid jinja ({where}): fetch the checkpoint again"
            ) from None

    def render(self, **variables: Any) -> tuple[str, list[Span] | None]:
        """Returns the text and the spans of the replies between marks; None without marks."""
        text, spans = "", []
        for part in self._template.render(**variables).split(BEGIN):
            reply, mark, rest = part.partition(END)
            if mark and reply:
                spans.append((len(text), len(text) + len(reply)))
            text += reply + rest
        return text, spans if self._marks else None


class _Generation(Extension):
    """``{% generation %}``, an extension of transformers for training."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        begin, end = (nodes.Output([nodes.TemplateData(mark)]) for mark in (BEGIN, END))
        return nodes.Scope([begin, *body, end]).set_lineno(line)


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
