"""The checkpoint's own tokenizer and chat template: ``tokenizers`` for text, a sandboxed ``jinja2`` for messages."""

import json
from pathlib import Path
from typing import Any

from mint_jax.errors import UserError

Message = dict[str, Any]  # {"role": ..., "content": ...}
SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """Text and chat messages to token ids and back, as the checkpoint defines them.

    Attributes:
        vocab_size: largest id + 1.
        eos_ids: ids that end a completion.
        special_ids: id of each special token by its text; ``decode`` leaves them out.
        eos_id: the one that ends a text: the tokenizer's own, else the model's; None where the checkpoint names none.
    """

    def __init__(self, directory: str | Path):
        from tokenizers import Tokenizer as FastTokenizer

        directory = Path(directory)
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise UserError(f"{path} does not exist: give token ids instead of text, or add the checkpoint's tokenizer.json")
        try:
            self._fast = FastTokenizer.from_file(str(path))
        except Exception as error:  # the Rust library raises bare Exception
            raise UserError(f"{path} is not a readable tokenizer ({error}): fetch the checkpoint again") from None
        config_path = directory / "tokenizer_config.json"
        self._config: dict[str, Any] = _read_json(config_path)
        self._template_source = self._read_template(directory)
        self._template: Any = None
        self.vocab_size = max(self._fast.get_vocab(with_added_tokens=True).values()) + 1
        self.eos_ids = self._read_eos(directory)
        self.special_ids = {token.content: i for i, token in self._fast.get_added_tokens_decoder().items() if token.special}
        own = self._special_id("eos_token")
        self.eos_id = own if own is not None else next(iter(self.eos_ids), None)

    def _read_template(self, directory: Path) -> str | None:
        file = directory / "chat_template.jinja"
        if file.is_file():
            return file.read_text()
        template = self._config.get("chat_template")
        if isinstance(template, list):  # named templates
            template = next((t["template"] for t in template if t["name"] == "default"), None)
        return template

    def _read_eos(self, directory: Path) -> tuple[int, ...]:
        ids: list[int] = []
        for name in ("generation_config.json", "config.json"):
            value = _read_json(directory / name).get("eos_token_id")
            ids += value if isinstance(value, list) else [value] if value is not None else []
        if (own := self._special_id("eos_token")) is not None:
            ids.append(own)
        return tuple(dict.fromkeys(ids))

    def _special(self, name: str) -> str | None:
        value = self._config.get(name)
        return value["content"] if isinstance(value, dict) else value

    def _special_id(self, name: str) -> int | None:
        token = self._special(name)
        return self._fast.token_to_id(token) if token else None

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Token ids; ``special`` adds what the checkpoint's post-processor adds (a bos token, say)."""
        return self._fast.encode(text, add_special_tokens=special).ids

    def decode(self, ids: list[int], skip_special: bool = True) -> str:
        return self._fast.decode(ids, skip_special_tokens=skip_special)

    @property
    def sources(self) -> tuple[str, str | None]:
        """What decides how a prompt becomes tokens: the tokenizer's JSON and the chat template's text, None without one."""
        return self._fast.to_str(), self._template_source

    @property
    def chats(self) -> bool:
        """Whether the checkpoint has a chat template."""
        return self._template_source is not None

    def render(self, messages: list[Message], generation_prompt: bool = True, **variables: Any) -> str:
        """The text of a conversation by the checkpoint's chat template, which sees what ``transformers`` shows it.

        Tools and documents are none where ``variables`` has none, and special tokens that the checkpoint lacks are undefined.

        Raises:
            UserError: the checkpoint has no template, or the template refuses the messages.
        """
        if self._template is None:
            self._template = _compile(self._template_source)
        shown = {"tools": None, "documents": None} | {n: token for n in SPECIAL if (token := self._special(n)) is not None} | variables
        try:
            return self._template.render(messages=messages, add_generation_prompt=generation_prompt, **shown)
        except Exception as error:  # jinja2 raises what the template raises
            raise UserError(f"the chat template refuses {str(messages)[:200]}: {error}") from None

    def encode_chat(self, messages: list[Message], generation_prompt: bool = True, **variables: Any) -> list[int]:
        """Token ids of a conversation; the template itself writes the special tokens."""
        return self.encode(self.render(messages, generation_prompt, **variables), special=False)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text()) if path.is_file() else {}
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON ({error}): fetch the checkpoint again") from None


def _compile(source: str | None) -> Any:
    import datetime

    from jinja2 import nodes
    from jinja2.exceptions import TemplateError, TemplateSyntaxError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    if source is None:
        raise UserError("this checkpoint has no chat template: give text or token ids instead of messages")

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    class Generation(Extension):
        """``{% generation %}`` marks replies for trainers; here only its contents count."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation])
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda pattern: datetime.datetime.now().strftime(pattern)
    try:
        return environment.from_string(source)
    except TemplateSyntaxError as error:
        where = f"line {error.lineno}: {error.message}"
        raise UserError(f"the chat template is not valid jinja ({where}): fetch the checkpoint again") from None
