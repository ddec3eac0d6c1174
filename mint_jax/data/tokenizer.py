"""Tokenizer and chat templates of a checkpoint: text and messages to token ids and back."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mint_jax.data import tokenizer_files
from mint_jax.data.chat_template import Span, Template, read_templates
from mint_jax.errors import UserError

Message = dict[str, Any]  # {"role": ..., "content": ...}


class Tokenizer:
    """Text and chat messages to token ids and back, as the checkpoint defines them.

    Attributes:
        vocab_size: largest id + 1.
        eos_ids: ids that end a completion.
        special_ids: id of each special token by its text; ``decode`` omits these tokens.
        eos_id: id that ends a text: the tokenizer's, else the model's; None if the checkpoint names
            none.
    """

    def __init__(self, directory: str | Path):
        directory = Path(directory)
        self._fast, self._named, config = tokenizer_files.read(directory)
        self._templates = read_templates(directory, config)
        self._compiled: dict[str, Template] = {}
        self.vocab_size = max(self._fast.get_vocab(with_added_tokens=True).values()) + 1
        added = self._fast.get_added_tokens_decoder().items()
        self.special_ids = {token.content: i for i, token in added if token.special}
        ends: list[int] = []
        for name in ("generation_config.json", "config.json"):
            value = tokenizer_files.read_json(directory / name).get("eos_token_id")
            ends += value if isinstance(value, list) else [] if value is None else [value]
        own = self._named.get("eos_token")
        self.eos_id = self._fast.token_to_id(own) if own else None
        ends += [] if self.eos_id is None else [self.eos_id]
        self.eos_ids = tuple(dict.fromkeys(ends))
        if self.eos_id is None:
            self.eos_id = next(iter(ends), None)

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Returns token ids. ``special`` adds the post-processor's tokens, such as a bos token."""
        return self._fast.encode(text, add_special_tokens=special).ids

    def decode(self, ids: list[int], skip_special: bool = True) -> str:
        return self._fast.decode(ids, skip_special_tokens=skip_special)

    def encode_spans(
        self, text: str, spans: Sequence[Span], special: bool = True
    ) -> tuple[list[int], list[range]]:
        """Returns the token ids of a text and, for each span of characters, the range of tokens
        with a character of the span, as in transformers' assistant mask. Tokens that the
        post-processor adds belong to no span.
        """
        encoding = self._fast.encode(text, add_special_tokens=special)
        added = encoding.special_tokens_mask if special else [0] * len(encoding.ids)
        ranges = []
        for begin, stop in spans:
            inside = [
                i
                for i, (start, end) in enumerate(encoding.offsets)
                if max(start, begin) < min(end, stop) and not added[i]
            ]
            ranges.append(range(inside[0], inside[-1] + 1) if inside else range(0))
        return encoding.ids, ranges

    @property
    def sources(self) -> tuple[str, str | None]:
        """JSON of the tokenizer and text of its chat templates: they determine the tokens."""
        return self._fast.to_str(), self.templates or None

    @property
    def templates(self) -> str:
        """Text of the chat templates; empty without any."""
        return "\n".join(self._templates.values())

    @property
    def chats(self) -> bool:
        """True if the checkpoint has a chat template."""
        return bool(self._templates)

    def render(
        self, messages: list[Message], generation_prompt: bool = True, **variables: Any
    ) -> str:
        """Returns the text of a conversation, rendered by the checkpoint's chat template with the
        variables that ``transformers`` passes.

        Tools and documents default to None, and special tokens that the checkpoint lacks are
        undefined. With several templates, ``tool_use`` is used if there are tools, else
        ``default``. Raises ``UserError``: the checkpoint has no template, or the template refuses
        the messages.
        """
        return self.render_replies(messages, generation_prompt, **variables)[0]

    def render_replies(
        self, messages: list[Message], generation_prompt: bool = False, **variables: Any
    ) -> tuple[str, list[Span] | None]:
        """Returns ``render`` and the spans of replies that the template marks, None without."""
        template = self._template("tool_use" if variables.get("tools") else "default")
        shown = {"tools": None, "documents": None} | self._named | variables
        shown |= {"messages": messages, "add_generation_prompt": generation_prompt}
        try:
            return template.render(**shown)
        except Exception as error:  # jinja2 raises what the template raises
            raise UserError(f"the chat template refuses {str(messages)[:200]}: {error}") from None

    def _template(self, name: str) -> Template:
        if not self._templates:
            raise UserError(
                "this checkpoint has no chat template: give text or token ids instead of messages"
            )
        name = name if name in self._templates else "default"
        if name not in self._templates:
            raise UserError(
                f"this checkpoint has chat templates {', '.join(self._templates)}, but none is"
                " called default: rename one"
            )
        if name not in self._compiled:
            self._compiled[name] = Template(self._templates[name])
        return self._compiled[name]

    def encode_chat(
        self, messages: list[Message], generation_prompt: bool = True, **variables: Any
    ) -> list[int]:
        """Returns the token ids of a conversation; the template writes the special tokens."""
        return self.encode(self.render(messages, generation_prompt, **variables), special=False)
