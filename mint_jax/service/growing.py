"""The text of tokens: as they come, and of each for itself."""

import json
from collections.abc import Callable, Sequence
from typing import Any

from mint_jax.data.tokenizer import Tokenizer
from mint_jax.rollout.stops import Stops

HALF = "\N{REPLACEMENT CHARACTER}"  # what decoding tells half a character as


class Growing:
    """One completion's text while it grows. What was told is never taken back: neither half a character is told, nor what may turn
    out to be the beginning of a stop string.

    All that was told is the completion's whole text. (A byte-fallback tokenizer tells all bytes in a row as unknown where the last are
    half a character: of a completion that is cut off there, earlier characters of that row were told as they are.)

    Args:
        decode: text of token ids.
        stop: strings that end it.
        marker: text that is kept for ``end`` from there on; empty: all of it.
    """

    def __init__(self, decode: Callable[[list[int]], str], stop: Sequence[str] = (), marker: str | None = None):
        self._decode, self._marker = decode, marker
        self._stops = Stops(decode, stop) if stop else None
        self._withheld = tuple(stop) if not marker else (*stop, marker)
        self.tokens: list[int] = []  # those that count: none behind the one that completes a stop string
        self._text, self._told = "", 0  # what is settled and not told yet, and how many characters were told
        self._from, self._to = 0, 0  # the tokens that were new when text was last settled

    def add(self, tokens: Sequence[int]) -> tuple[int, str]:
        """How many of these tokens count, and the text that can now be told."""
        before = len(self.tokens)
        self.tokens += tokens
        if self._stops is not None:
            end, text = self._stops.look(self.tokens)
            if end is not None:
                assert text is not None
                del self.tokens[end:]
                self._text = text[self._told :]
                return end - before, self._tell(self._limit())
        known = self._decode(self.tokens[self._from : self._to])
        new = self._decode(self.tokens[self._from :])[len(known) :]
        if new and not new.endswith(HALF):
            self._text, self._from, self._to = self._text + new, self._to, len(self.tokens)
        return len(tokens), self._tell(min(self._limit(), len(self._text) - self._open()))

    def end(self, text: str) -> str:
        """What was not told yet of the whole text."""
        self._text = text[self._told :]
        return self._tell(len(self._text))

    def _tell(self, count: int) -> str:
        told, self._text = self._text[:count], self._text[count:]
        self._told += count
        return told

    def _limit(self) -> int:
        """Characters before the marker."""
        found = -1 if self._marker is None else self._text.find(self._marker)
        return len(self._text) if found < 0 else found

    def _open(self) -> int:
        """Characters at the end that may begin something that is withheld."""
        longest = max(map(len, self._withheld), default=1) - 1
        for count in range(min(longest, len(self._text)), 0, -1):
            tail = self._text[-count:]
            if any(text.startswith(tail) for text in self._withheld):
                return count
        return 0


class TokenTexts:
    """The bytes of each token id, which may be half a character."""

    def __init__(self, tokenizer: Tokenizer):
        source = json.loads(tokenizer.sources[0])
        vocab: Any = source["model"]["vocab"]
        pieces = vocab.items() if isinstance(vocab, dict) else ((entry[0], i) for i, entry in enumerate(vocab))
        read = _byte_level if "ByteLevel" in json.dumps(source["decoder"]) else _by_word
        self._bytes: dict[int, bytes] = {i: read(piece) for piece, i in pieces}
        self._bytes |= {token["id"]: token["content"].encode() for token in source["added_tokens"]}
        self.special = set(tokenizer.special_ids.values())

    def bytes_of(self, token: int) -> bytes:
        """Empty for an id that the tokenizer does not have."""
        return self._bytes.get(token, b"")

    def text_of(self, token: int) -> str:
        """Its text; ``bytes:\\xe6\\x97`` for what is no whole character, as OpenAI's completions tell it."""
        data = self.bytes_of(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _unicode_of_bytes() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes are themselves, the others follow from 256 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + n): byte for n, byte in enumerate(others)}


_ALPHABET = _unicode_of_bytes()


def _byte_level(piece: str) -> bytes:
    return b"".join(bytes((_ALPHABET[char],)) if char in _ALPHABET else char.encode() for char in piece)


def _by_word(piece: str) -> bytes:
    """SentencePiece's: a low line for a blank, and single bytes by their number."""
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return bytes.fromhex(piece[3:5])
    return piece.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()
