"""Where a stop string ends a completion."""

from collections.abc import Callable, Sequence


class Stops:
    """Looks for stop strings in one completion as it grows; each look decodes what is new and a little before it.

    Args:
        decode: text of token ids.
        stops: none of them empty.
    """

    def __init__(self, decode: Callable[[list[int]], str], stops: Sequence[str]):
        self._decode, self._stops = decode, stops
        self._text, self._from, self._to = "", 0, 0  # what tokens say up to ``to``, and where the ones that were new then begin

    def look(self, tokens: list[int]) -> tuple[int | None, str | None]:
        """How many tokens it takes to complete the first stop string, and the text before it; None twice where there is none.

        Args:
            tokens: all of the completion's; those of the look before and more.
        """
        # What a token says depends on those before it (half a character, a word's first space): text of new tokens is what they add
        # to the tokens that were new the last time.
        known = self._decode(tokens[self._from : self._to])
        kept = max(map(len, self._stops)) - 1
        seen = self._text[len(self._text) - min(kept, len(self._text)) :]

        def added(count: int) -> str:
            return self._decode(tokens[self._from : count])[len(known) :]

        def there(text: str) -> bool:
            return any(stop in text for stop in self._stops)

        new = added(len(tokens))
        if there(seen + new):
            low, high = self._to + 1, len(tokens)
            # The shortest prefix whose text holds a stop string, by halves: a token may complete several characters, or half of one, so
            # that where a text is cut says nothing of which token did it; once there, a stop string stays in all longer prefixes.
            while low < high:
                middle = (low + high) // 2
                if there(seen + added(middle)):
                    high = middle
                else:
                    low = middle + 1
            text = seen + added(low)
            end = min(text.find(stop) for stop in self._stops if stop in text)
            return low, self._text[: len(self._text) - len(seen)] + text[:end]
        if new and not new.endswith("\N{REPLACEMENT CHARACTER}"):  # which half a character is told as
            self._text, self._from, self._to = self._text + new, self._to, len(tokens)
        return None, None
