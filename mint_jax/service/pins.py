"""Fixed parts of an answer of OpenAI's API: revision, seed, name and time, and tokens sent already.

A front gives one pin to several engines in turn: the second one gives the answer that the first one
would have given, token for token, from the token on that the client does not have yet.
"""

import re
from typing import NamedTuple

from mint_jax.errors import UserError

HEADER = "x-mint-pin"
_FORM = re.compile(
    r"revision=(?P<revision>base|[0-9a-f]{64}|);id=(?P<id>[0-9a-z.-]{1,80});"
    r"seed=(?P<seed>[0-9]{1,10});at=(?P<at>[0-9]{1,12});events=(?P<events>[0-9]{1,9});"
    r"sent=(?P<sent>(?:[0-9]+:[0-9]+(?:,[0-9]+:[0-9]+)*)?)"
)
BASE = "base"  # in place of a digest
_COMMENT = ": sent "  # begins a comment of a stream: events and tokens so far


class Pin(NamedTuple):
    """The fixed parts of one answer.

    Attributes:
        revision: digest, ``base``, or empty: the name is resolved by the engine.
        id: the answer's name behind its prefix, such as ``chatcmpl-``.
        seed: of the first prompt; the next ones count from it. A seed of the body has precedence.
        at: seconds since 1970, the answer's ``created``.
        events: number of events that were sent.
        sent: number of tokens that were sent, by choice.
    """

    revision: str
    id: str
    seed: int
    at: int
    events: int = 0
    sent: tuple[tuple[int, int], ...] = ()

    @classmethod
    def parse(cls, text: str) -> "Pin":
        """Parses a header. Raises ``UserError``."""
        if (found := _FORM.fullmatch(text)) is None:
            raise UserError(
                f"{HEADER} is {text[:200]!r}; expected what a front of this version sends:"
                " revision=DIGEST;id=ID;seed=N;at=SECONDS;events=N;sent=CHOICE:TOKENS"
            )
        events, sent = _progress(found["events"], found["sent"])
        seed, at = int(found["seed"]), int(found["at"])
        return cls(found["revision"], found["id"], seed, at, events, sent)

    def to_header(self) -> str:
        """Returns the text that ``parse`` reads."""
        place = f"revision={self.revision};id={self.id};seed={self.seed};at={self.at}"
        return f"{place};events={self.events};sent={_counts(dict(self.sent))}"

    def after(self, comment: str) -> "Pin":
        """Returns the pin of an answer whose stream has come to this comment."""
        events, _, counts = comment.removeprefix(_COMMENT).strip().partition(" ")
        events, sent = _progress(events, counts)
        return self._replace(events=events, sent=sent)


def comment_of(events: int, sent: dict[int, int]) -> str:
    """Returns the comment of a stream that says what was sent before it."""
    return f"{_COMMENT}{events} {_counts(sent)}\n\n"


def is_comment(event: str) -> bool:
    """Returns whether an event of a stream is such a comment."""
    return event.startswith(_COMMENT)


def _counts(sent: dict[int, int]) -> str:
    return ",".join(f"{choice}:{count}" for choice, count in sorted(sent.items()))


def _progress(events: str, sent: str) -> tuple[int, tuple[tuple[int, int], ...]]:
    pairs = (one.split(":") for one in sent.split(",") if one)
    return int(events), tuple((int(choice), int(count)) for choice, count in pairs)
