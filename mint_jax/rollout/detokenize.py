"""Text of sampled tokens, decoded after their prompt.

A token's text depends on the tokens before it: SentencePiece drops the space before a text's first
word, and one character may span several tokens. The text of a completion is therefore the text that
its tokens add to that of the prompt.
"""

from collections.abc import Callable, Sequence

HALF = "\N{REPLACEMENT CHARACTER}"  # decoded text of an incomplete character
# Prompt tokens decoded with a completion; more if these contain no whole character.
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
    """Returns the text that tokens add after a context, including a character that they
    complete.
    """
    known, whole = decode(list(context)), decode([*context, *tokens])
    if whole.startswith(known):
        return whole[len(known) :]
    shared = (i for i, (one, other) in enumerate(zip(known, whole)) if one != other)
    return whole[next(shared, min(len(known), len(whole))) :]


class Detokenizer:
    """Incremental text of one completion. Each call decodes the new tokens and a few before them.

    Args:
        decode: converts token ids to text.
        prompt: token ids of the prompt.

    Attributes:
        text: the text that later tokens cannot change.
    """

    def __init__(self, decode: Decode, prompt: Sequence[int] = ()):
        self._decode, self._context, self._count = decode, context_of(decode, prompt), 0
        self.text = ""

    def added(self, tokens: Sequence[int], count: int | None = None) -> str:
        """Returns the text after ``text`` of the completion's first ``count`` tokens (None:
        all).
        """
        return text_behind(self._decode, self._context, tokens[self._count : count])

    def settle(self, tokens: Sequence[int], added: str) -> None:
        """Appends the text of all tokens to ``text``, unless they end within a character."""
        if added and not added.endswith(HALF):
            self.text += added
            self._context, self._count = list(tokens[self._count :]), len(tokens)

    @property
    def count(self) -> int:
        """Number of tokens whose text is in ``text``."""
        return self._count
