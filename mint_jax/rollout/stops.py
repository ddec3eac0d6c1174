"""Search for stop strings in a growing completion."""

from collections.abc import Sequence

from mint_jax.rollout.detokenize import Decode, Detokenizer


class Stops:
    """Searches one completion for stop strings while it grows.

    Args:
        decode: converts token ids to text.
        stops: non-empty strings.
        prompt: token ids that the completion continues.

    Attributes:
        detokenizer: incremental text of the completion.
    """

    def __init__(self, decode: Decode, stops: Sequence[str], prompt: Sequence[int] = ()):
        self.detokenizer, self._stops = Detokenizer(decode, prompt), stops

    def look(self, tokens: list[int]) -> tuple[int | None, str | None]:
        """Returns the number of tokens that complete the first stop string, and the text before
        it; (None, None) without a match.

        Args:
            tokens: all tokens of the completion so far.
        """
        known = self.detokenizer.text
        kept = max(map(len, self._stops)) - 1
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
