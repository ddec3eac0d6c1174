"""Where a stop string ends a completion."""

from collections.abc import Sequence

from mint_jax.rollout.detokenize import Decode, Detokenizer


class Stops:
    """Looks for stop strings in one completion while it grows.

    Args:
        decode: text of token ids.
        stops: none of them empty.
        prompt: token ids that the completion continues.

    Attributes:
        detokenizer: the completion's text.
    """

    def __init__(self, decode: Decode, stops: Sequence[str], prompt: Sequence[int] = ()):
        self.detokenizer, self._stops = Detokenizer(decode, prompt), stops

    def look(self, tokens: list[int]) -> tuple[int | None, str | None]:
        """Returns how many tokens complete the first stop string, and the text before it; None
        twice if there is none.

        Args:
            tokens: all tokens of the completion: those of the last call and more.
        """
        known = self.detokenizer.text
        kept = max(map(len, self._stops)) - 1
        seen = known[len(known) - min(kept, len(known)) :]

        def holds(text: str) -> bool:
            return any(stop in text for stop in self._stops)

        added = self.detokenizer.added(tokens)
        if not holds(seen + added):
            self.detokenizer.settle(tokens, added)
            return None, None
        low, high = self.detokenizer.count + 1, len(tokens)
        # Bisects for the shortest prefix whose text holds a stop string: a token may complete
        # several characters, or a part of one, so the place of the string does not say which token
        # completed it; every longer prefix holds it too.
        while low < high:
            middle = (low + high) // 2
            if holds(seen + self.detokenizer.added(tokens, middle)):
                high = middle
            else:
                low = middle + 1
        text = seen + self.detokenizer.added(tokens, low)
        end = min(text.find(stop) for stop in self._stops if stop in text)
        return low, known[: len(known) - len(seen)] + text[:end]
