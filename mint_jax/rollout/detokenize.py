"""Text of sampled tokens, decoded behind their prompt.

A token's text depends on the tokens before it: SentencePiece-like tokenizers drop the blank of a
text's first word, and one character may be split over several tokens. So the text of a completion
is what its tokens add to the text of the prompt.
"""

from collections.abc import Callable, Sequence

HALF = "\N{REPLACEMENT CHARACTER}"  # what part of a character decodes to
# tokens of a prompt that are decoded with a completion; more where these are no whole character
CONTEXT = 8

Decode = Callable[[list[int]], str]


def context_of(decode: Decode, prompt: Sequence[int]) -> list[int]:
    """Returns the end of a prompt that decodes to at least one whole character; the whole prompt if
    it has none.
    """
    count = CONTEXT
    while count < len(prompt):
        if decode(list(prompt[-count:])).strip(HALF):
            return list(prompt[-count:])
        count *= 4
    return list(prompt)


def text_behind(decode: Decode, context: Sequence[int], tokens: Sequence[int]) -> str:
    """Returns the text that tokens add behind a context; a character that they complete is
    theirs.
    """
    known, whole = decode(list(context)), decode([*context, *tokens])
    if whole.startswith(known):
        return whole[len(known) :]
    shared = (i for i, (one, other) in enumerate(zip(known, whole)) if one != other)
    return whole[next(shared, min(len(known), len(whole))) :]


class Detokenizer:
    """Text of one completion while it grows; each call decodes the new tokens and a few before
    them.

    Args:
        decode: text of token ids.
        prompt: token ids of the prompt.

    Attributes:
        text: the part that later tokens do not change.
    """

    def __init__(self, decode: Decode, prompt: Sequence[int] = ()):
        self._decode, self._context, self._count = decode, context_of(decode, prompt), 0
        self.text = ""

    def added(self, tokens: Sequence[int], count: int | None = None) -> str:
        """Returns what the completion's first ``count`` tokens (None: all) add to ``text``."""
        return text_behind(self._decode, self._context, tokens[self._count : count])

    def settle(self, tokens: Sequence[int], added: str) -> None:
        """Moves what all tokens add to ``text``, unless they end within a character."""
        if added and not added.endswith(HALF):
            self.text += added
            self._context, self._count = list(tokens[self._count :]), len(tokens)

    @property
    def count(self) -> int:
        """Number of tokens whose text is in ``text``."""
        return self._count
