"""Text of sampled tokens, decoded after their prompt, and the search for stop strings in it.

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
    """Returns the end of a prompt that decodes to at least one whole character, or all of it."""
    count = CONTEXT
    while count < len(prompt):
        if decode(list(prompt[-count:])).strip(HALF):
            return list(prompt[-count:])
        count *= 4
    return list(prompt)


def text_behind(decode: Decode, context: Sequence[int], tokens: Sequence[int]) -> str:
    """Returns the text that tokens add after a context, with a character that they complete."""
    known, whole = decode(list(context)), decode([*context, *tokens])
    if whole.startswith(known):
        return whole[len(known) :]
    shared = (i for i, (one, other) in enumerate(zip(known, whole)) if one != other)
    return whole[next(shared, min(len(known), len(whole))) :]


class Detokenizer:
    """Incremental text of one completion; ``text`` is what later tokens cannot change. Each call
    decodes the new tokens and a few before them.
    """

    def __init__(self, decode: Decode, prompt: Sequence[int] = ()):
        self._decode, self._context = decode, context_of(decode, prompt)
        self.count = 0  # tokens whose text is in ``text``
        self.text = ""

    def added(self, tokens: Sequence[int], count: int | None = None) -> str:
        """Returns the text after ``text`` of the first ``count`` tokens (None: all)."""
        return text_behind(self._decode, self._context, tokens[self.count : count])

    def settle(self, tokens: Sequence[int], added: str) -> None:
        """Appends the text of all tokens to ``text``, unless they end within a character."""
        if added and not added.endswith(HALF):
            self.text += added
            self._context, self.count = list(tokens[self.count :]), len(tokens)


class Stops:
    """Searches one completion for non-empty stop strings while it grows."""

    def __init__(self, decode: Decode, stops: Sequence[str], prompt: Sequence[int] = ()):
        self.detokenizer, self._stops = Detokenizer(decode, prompt), stops

    def look(self, tokens: list[int]) -> tuple[int | None, str | None]:
        """Returns the number of tokens that complete the first stop string among all tokens so far,
        and the text before it; (None, None) without a match.
        """
        known = self.detokenizer.text
        kept = max(map(len, self._stops), default=1) - 1
        tail = known[len(known) - min(kept, len(known)) :]

        def holds(text: str) -> bool:
            return any(stop in text for stop in self._stops)

        added = self.detokenizer.added(tokens)
        if not holds(tail + added):
            self.detokenizer.settle(tokens, added)
            return None, None
        low, high = self.detokenizer.count + 1, len(tokens)
        # Bisects for the shortest prefix whose text contains a stop string. A token may complete
        # several characters or part of one, so the string's position does not name the token; every
        # longer prefix contains it too.
        while low < high:
            middle = (low + high) // 2
            if holds(tail + self.detokenizer.added(tokens, middle)):
                high = middle
            else:
                low = middle + 1
        text = tail + self.detokenizer.added(tokens, low)
        end = min(text.find(stop) for stop in self._stops if stop in text)
        return low, known[: len(known) - len(tail)] + text[:end]
