"""Fixed parts of an answer of OpenAI's API: revision, seed, name and time, and tokens sent already.

A front gives one pin to several engines in turn: the second one gives the answer that the first one
would have given, token for token, from the token on that the client does not have yet. The tokens
that the client has are verified many at once (``Request.prefixes``), so that it waits a short time.
"""

import dataclasses
import json
from collections.abc import Iterable, Mapping
from typing import Annotated

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from mint_jax.errors import UserError
from mint_jax.rollout.witness import BASE  # noqa: F401 in place of a digest

# A pin is the first bytes of a body; the header is their number. A header of its own size would end
# at 64 KiB, the limit of h11, which is 10,000 tokens.
HEADER = "x-mint-pin"
_COMMENT = ": sent "  # begins a comment of a stream: what was sent since the last one

Number = Annotated[int, Field(ge=0)]


@dataclass(config=ConfigDict(extra="forbid"))
class Pin:
    """The fixed parts of one answer.

    Attributes:
        revision: digest, ``base``, or empty: the name is resolved by the engine.
        id: the answer's name behind its prefix, such as ``chatcmpl-``.
        seed: of the first prompt; the next ones count from it. A seed of the body has precedence.
        at: seconds since 1970, the answer's ``created``.
        events: number of events that were sent.
        sent: tokens that were sent, by choice.
        ended: choices whose last event was sent.
        accepted: an engine has accepted it, so ``revision`` answers itself and not its stand-in.
    """

    revision: Annotated[str, Field(pattern="^(base|[0-9a-f]{64}|)$")]
    id: Annotated[str, Field(pattern="^[0-9a-z.-]{0,80}$")]
    seed: Annotated[int, Field(ge=0, lt=2**32)]
    at: Number
    events: Number = 0
    sent: dict[Number, list[Number]] = dataclasses.field(default_factory=dict)
    ended: list[Number] = dataclasses.field(default_factory=list)
    accepted: bool = False

    def follow(self, comment: str) -> None:
        """Adds what a comment says was sent."""
        said = json.loads(comment.removeprefix(_COMMENT))
        self.events, self.ended = said["events"], said["ended"]
        for choice, tokens in said["sent"].items():
            self.sent.setdefault(int(choice), []).extend(tokens)

    def before(self, body: bytes) -> tuple[str, bytes]:
        """Returns the value of ``HEADER``, and the body behind this pin."""
        text = json.dumps(dataclasses.asdict(self)).encode()
        return str(len(text)), text + body


_PIN = TypeAdapter(Pin)


def split(header: str | None, body: bytes) -> tuple[Pin | None, bytes]:
    """Returns the pin before a body, if there is one, and the body. Raises ``UserError``."""
    if header is None:
        return None, body
    length = int(header) if header.isascii() and header.isdigit() else 0
    try:
        return _PIN.validate_json(body[:length]), body[length:]
    except ValidationError as error:
        [first, *_] = error.errors()
        raise UserError(
            f"{HEADER} is {header[:80]!r}, and the body begins with {body[:length][:200]!r}"
            f" ({first['msg']}); expected the number of bytes of a pin before the body, as a front"
            " of this version sends it"
        ) from None


def comment_of(events: int, sent: Mapping[int, list[int]], ended: Iterable[int]) -> str:
    """Returns the comment of a stream that says what was sent before it: all events, the tokens
    since the last comment by choice, and the choices that have ended.
    """
    said = {"events": events, "sent": sent, "ended": sorted(ended)}
    return f"{_COMMENT}{json.dumps(said)}\n\n"


def is_comment(event: str) -> bool:
    """Returns whether an event of a stream is such a comment."""
    return event.startswith(_COMMENT)
