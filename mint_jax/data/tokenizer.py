"""The checkpoint's own tokenizer and chat templates: text and messages to token ids and back."""

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
        special_ids: id of each special token by its text; ``decode`` leaves them out.
        eos_id: the one that ends a text: the tokenizer's own, else the model's; None where the
            checkpoint names none.
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
        """Token ids; ``special`` adds what the checkpoint's post-processor adds (a bos token,
        say).
        """
        return self._fast.encode(text, add_special_tokens=special).ids

    def decode(self, ids: list[int], skip_special: bool = True) -> str:
        return self._fast.decode(ids, skip_special_tokens=skip_special)

    def encode_spans(
        self, text: str, spans: Sequence[Span], special: bool = True
    ) -> tuple[list[int], list[range]]:
        """Token ids of a whole text, and which of them stand in each of some spans of its
        characters.

        A token that holds a character of a span is in it, also one that straddles its beginning or
        its end (as in transformers' assistant mask). Tokens that the post-processor adds are in
        none.
        """
        encoding = self._fast.encode(text, add_special_tokens=special)
        added = encoding.special_tokens_mask if special else [0] * len(encoding.ids)
        placed = [
            (i, *place)
            for i, place in enumerate(encoding.offsets)
            if place[0] < place[1] and not added[i]
        ]
        held = (
            [i for i, start, end in placed if max(start, begin) < min(end, stop)]
            for begin, stop in spans
        )
        return encoding.ids, [
            range(found[0], found[-1] + 1) if found else range(0) for found in held
        ]

    @property
    def sources(self) -> tuple[str, str | None]:
        """What decides how a prompt becomes tokens: the tokenizer's JSON and the chat templates'
        text, None without one.
        """
        return self._fast.to_str(), "\n".join(self._templates.values()) if self._templates else None

    @property
    def chats(self) -> bool:
        """Whether the checkpoint has a chat template."""
        return bool(self._templates)

    def render(
        self, messages: list[Message], generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The text of a conversation by the checkpoint's chat template, which sees what
        ``transformers`` shows it.

        Tools and documents are none where ``variables`` has none, and special tokens that the
        checkpoint lacks are undefined. Of several templates ``tool_use`` is taken where there are
        tools, else ``default``.

        Raises:
            UserError: the checkpoint has no template, or the template refuses the messages.
        """
        return self._render(messages, generation_prompt, variables)[0]

    def render_replies(
        self, messages: list[Message], **variables: Any
    ) -> tuple[str, list[Span] | None]:
        """The text of a conversation, and where the template marks replies in it; None if it marks
        none.

        A template marks them by ``{% generation %}``.
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
        """Token ids of a conversation; the template itself writes the special tokens."""
        return self.encode(self.render(messages, generation_prompt, **variables), special=False)
