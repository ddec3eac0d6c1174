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
        self.eos_ids = self._read_eos(directory)
        self.special_ids = {
            token.content: i
            for i, token in self._fast.get_added_tokens_decoder().items()
            if token.special
        }
        own = self._special_id("eos_token")
        self.eos_id = own if own is not None else next(iter(self.eos_ids), None)

    def _read_eos(self, directory: Path) -> tuple[int, ...]:
        ids: list[int] = []
        for name in ("generation_config.json", "config.json"):
            value = tokenizer_files.read_json(directory / name).get("eos_token_id")
            ids += value if isinstance(value, list) else [value] if value is not None else []
        if (own := self._special_id("eos_token")) is not None:
            ids.append(own)
        return tuple(dict.fromkeys(ids))

    def _special_id(self, name: str) -> int | None:
        token = self._named.get(name)
        return self._fast.token_to_id(token) if token else None

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Returns token ids. ``special`` adds the post-processor's tokens, such as a bos token."""
        return self._fast.encode(text, add_special_tokens=special).ids

    def decode(self, ids: list[int], skip_special: bool = True) -> str:
        return self._fast.decode(ids, skip_special_tokens=skip_special)

    def encode_spans(
        self, text: str, spans: Sequence[Span], special: bool = True
    ) -> tuple[list[int], list[range]]:
        """Returns the token ids of a text and, for each span of characters, the range of tokens in
        it.

        A token belongs to a span if it has a character of the span, as in transformers' assistant
        mask. Tokens that the post-processor adds belong to no span.
        """
        encoding = self._fast.encode(text, add_special_tokens=special)
        added = encoding.special_tokens_mask if special else [0] * len(encoding.ids)
        placed = [
            (i, *place)
            for i, place in enumerate(encoding.offsets)
            if place[0] < place[1] and not added[i]
        ]
        inside = (
            [i for i, start, end in placed if max(start, begin) < min(end, stop)]
            for begin, stop in spans
        )
        return encoding.ids, [
            range(found[0], found[-1] + 1) if found else range(0) for found in inside
        ]

    @property
    def sources(self) -> tuple[str, str | None]:
        """JSON of the tokenizer and text of the chat templates (None without one); they determine a
        prompt's tokens.
        """
        return self._fast.to_str(), "\n".join(self._templates.values()) if self._templates else None

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
        ``default``.

        Raises:
            UserError: the checkpoint has no template, or the template refuses the messages.
        """
        return self._render(messages, generation_prompt, variables)[0]

    def render_replies(
        self, messages: list[Message], **variables: Any
    ) -> tuple[str, list[Span] | None]:
        """Returns the text of a conversation and the spans of replies that the template marks with
        ``{% generation %}``, or None if it marks none.
        """
        text, spans, marks = self._render(messages, False, variables)
        return text, spans if marks else None

    def _render(
        self, messages: list[Message], generation_prompt: bool, variables: dict[str, Any]
    ) -> tuple[str, list[Span], bool]:
        name = self._template_name(bool(variables.get("tools")))
        if name not in self._compiled:
            self._compiled[name] = Template(self._templates[name])
        template = self._compiled[name]
        shown = {"tools": None, "documents": None} | self._named | variables
        try:
            return (
                *template.render(
                    messages=messages, add_generation_prompt=generation_prompt, **shown
                ),
                template.marks,
            )
        except Exception as error:  # jinja2 raises what the template raises
            raise UserError(f"the chat template refuses {str(messages)[:200]}: {error}") from None

    def _template_name(self, tools: bool) -> str:
        if not self._templates:
            raise UserError(
                "this checkpoint has no chat template: give text or token ids instead of messages"
            )
        for name in ("tool_use", "default") if tools else ("default",):
            if name in self._templates:
                return name
        raise UserError(
            f"this checkpoint has chat templates {', '.join(self._templates)}, but none is called"
            " default: rename one"
        )

    def encode_chat(
        self, messages: list[Message], generation_prompt: bool = True, **variables: Any
    ) -> list[int]:
        """Returns the token ids of a conversation; the template writes the special tokens."""
        return self.encode(self.render(messages, generation_prompt, **variables), special=False)
