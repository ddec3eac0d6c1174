"""Chat templates of a checkpoint: locates them and renders them as transformers does, in sandboxed
``jinja2``.
"""

import datetime
import json
import secrets
from pathlib import Path
from typing import Any

from mint_jax.errors import UserError

Span = tuple[int, int]  # first character, one past the last


def read_templates(directory: Path, config: dict[str, Any]) -> dict[str, str]:
    """Returns the text of each template by name; the usual one is ``default``.

    Files (``chat_template.jinja``, ``additional_chat_templates/NAME.jinja``) take precedence over
    ``chat_template`` in ``tokenizer_config.json``, which is a text, a list of names and texts, or a
    mapping.

    Raises:
        UserError: a template is not text.
    """
    files = {"default": directory / "chat_template.jinja"}
    files |= {
        path.stem: path
        for path in sorted((directory / "additional_chat_templates").glob("*.jinja"))
    }
    if found := {
        name: path.read_text(encoding="utf-8") for name, path in files.items() if path.is_file()
    }:
        return found
    given: Any = config.get("chat_template")
    if isinstance(given, list) and all(
        isinstance(one, dict) and {"name", "template"} <= one.keys() for one in given
    ):
        given = {one["name"]: one["template"] for one in given}
    if given is None:
        return {}
    templates: dict[str, Any] = given if isinstance(given, dict) else {"default": given}
    if not all(isinstance(text, str) for text in templates.values()):
        raise UserError(
            f"chat_template in {directory / 'tokenizer_config.json'} must be text or named texts:"
            " fetch it again"
        )
    return templates


class Template:
    """A compiled template.

    Attributes:
        marks: true if it marks replies with ``{% generation %}``.

    Raises:
        UserError: the source is not valid jinja.
    """

    def __init__(self, source: str):
        from jinja2 import nodes
        from jinja2.exceptions import TemplateError, TemplateSyntaxError
        from jinja2.ext import Extension, loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        self.marks = False
        # random marks that no text contains
        self._begin, self._end = (f"\N{NULL}{secrets.token_hex(16)}" for _ in range(2))

        def refuse(message: str) -> None:
            raise TemplateError(message)

        def to_json(
            value: Any,
            ensure_ascii: bool = False,
            indent: int | None = None,
            separators: Any = None,
            sort_keys: bool = False,
        ) -> str:
            return json.dumps(
                value,
                ensure_ascii=ensure_ascii,
                indent=indent,
                separators=separators,
                sort_keys=sort_keys,
            )

        def mark(text: str) -> Any:
            return nodes.Output([nodes.TemplateData(text)])

        def parse_marked(parser: Any) -> Any:
            line = next(parser.stream).lineno
            self.marks = True
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope([mark(self._begin), *body, mark(self._end)]).set_lineno(line)

        class Generation(Extension):
            """``{% generation %}``, an extension of transformers for training."""

            tags = {"generation"}

            def parse(self, parser: Any) -> Any:
                return parse_marked(parser)

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
        )
        environment.filters["tojson"] = to_json
        environment.globals["raise_exception"] = refuse
        environment.globals["strftime_now"] = lambda pattern: datetime.datetime.now().strftime(
            pattern
        )
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            where = f"line {error.lineno}: {error.message}"
            raise UserError(
                f"the chat template is not valid jinja ({where}): fetch the checkpoint again"
            ) from None

    def render(self, **variables: Any) -> tuple[str, list[Span]]:
        """Returns the text and the spans of the marked replies."""
        text = self._template.render(**variables)
        spans, parts, length = [], [], 0
        for part in text.split(self._begin):
            reply, mark, rest = part.partition(self._end)
            if mark and reply:
                spans.append((length, length + len(reply)))
            parts.append(reply + rest)
            length += len(parts[-1])
        return "".join(parts), spans
