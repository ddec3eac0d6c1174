"""Text of a completion while it is streamed, and the bytes and offsets of its tokens."""

import bisect
import codecs
import json
import re
from collections.abc import Sequence
from typing import Any

from mint_jax.data.tokenizer import Tokenizer
from mint_jax.rollout.detokenize import HALF, Stops, text_behind

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
# GPT-2's alphabet of bytes: printable ones are themselves, the others count from 256
_ALPHABET = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(256 + n): byte for n, byte in enumerate(sorted({*range(256)} - {*_PRINTABLE}))
}


class TokenTexts:
    """The bytes of each token id, which may be part of a character."""

    def __init__(self, tokenizer: Tokenizer):
        source = json.loads(tokenizer.sources[0])
        vocab: Any = source["model"]["vocab"]
        if isinstance(vocab, dict):
            self._pieces: dict[int, str] = {i: piece for piece, i in vocab.items()}
        else:
            self._pieces = {i: entry[0] for i, entry in enumerate(vocab)}
        self._bytes = {token["id"]: token["content"].encode() for token in source["added_tokens"]}
        self._is_byte_level = "ByteLevel" in json.dumps(source.get("decoder"))
        self.decode, self._before = tokenizer.decode, tokenizer.encode("a", special=False)[-1:]
        self.special = set(tokenizer.special_ids.values())

    def bytes_of(self, token: int) -> bytes:
        """Returns a token's bytes after other text; empty for an unknown id."""
        if token not in self._bytes:
            if (piece := self._pieces.get(token)) is None:
                return b""
            if self._is_byte_level:
                chars = (bytes([_ALPHABET[c]]) if c in _ALPHABET else c.encode() for c in piece)
                data = b"".join(chars)
            elif (byte := _BYTE.fullmatch(piece)) is not None:
                data = bytes.fromhex(byte[1])
            else:
                data = text_behind(self.decode, self._before, [token]).encode()
            self._bytes[token] = data
        return self._bytes[token]

    def text_of(self, token: int) -> str:
        """Returns a token's text; ``bytes:\\xe6\\x97`` for part of a character, as OpenAI's
        completions write it.
        """
        data = self.bytes_of(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class Offsets:
    """Offsets of tokens in a text, in characters: ``starts`` has the offset of the character with
    each token's first byte.

    Args:
        prompt: token ids before the text, whose last character its tokens may complete.
        special: special tokens are part of the text, as in prompts.
    """

    def __init__(self, texts: TokenTexts, prompt: Sequence[int] = (), special: bool = False):
        self._texts, self._special, self._next = texts, special, 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._decoder.decode(b"".join(map(texts.bytes_of, prompt[-3:])))
        self.starts: list[int] = []

    def add(self, tokens: Sequence[int], text: str) -> None:
        """Adds tokens; ``text`` is all known text, which shows its blanks and special tokens."""
        for token in tokens:
            data = self._texts.bytes_of(token)
            continues = data[:1] != b"" and data[0] & 0xC0 == 0x80
            if not self.starts and not continues:
                self._decoder.reset()
            # an incomplete character before this token becomes a replacement character
            start = self._next + (bool(self._decoder.getstate()[0]) and not continues)
            if token in self._texts.special and not (
                self._special and data.decode() in text[start : start + len(data) + 1]
            ):
                data = b""
            part = data.decode(errors="replace")
            # tokenizers add and drop blanks at the start of words
            if HALF not in part and not text.startswith(part, start):
                if text.startswith(" " + part, start):
                    start, self._next = start + 1, self._next + 1
                elif part.startswith(" ") and text.startswith(part[1:], start):
                    data = data[1:]
            self.starts.append(start)
            self._next += len(self._decoder.decode(data))

    def within(self, length: int) -> int:
        """Returns the number of tokens that start in the text's first ``length`` characters."""
        return bisect.bisect_left(self.starts, length)


class TextStream:
    """Final text of one completion while it is sampled: incomplete characters are withheld, and so
    is text that may begin a stop string.

    All parts together are the completion's text, with one exception: a byte-fallback tokenizer
    decodes a run of bytes as unknown if the run ends within a character, but the earlier characters
    of the run were already returned.

    Args:
        marker: text from which on everything is withheld until ``end``; empty: everything is.

    Attributes:
        tokens: up to the one that completes a stop string.
        text: returned so far.
        count: number of tokens that start in ``text``.
    """

    def __init__(
        self,
        texts: TokenTexts,
        prompt: Sequence[int] = (),
        stop: Sequence[str] = (),
        marker: str | None = None,
    ):
        self._decode, self._marker = texts.decode, marker
        self._stops = Stops(texts.decode, stop, prompt)
        self._detokenizer = self._stops.detokenizer
        self._withheld = (*stop, marker) if marker else tuple(stop)
        self.tokens: list[int] = []
        self.offsets = Offsets(texts, prompt)
        self.text, self.count = "", 0

    def add(self, tokens: Sequence[int]) -> str:
        """Adds sampled tokens and returns the next text."""
        self.tokens += tokens
        end, known = self._stops.look(self.tokens)
        if end is not None and known is not None:
            del self.tokens[end:]
            settled, limit = len(self.tokens), len(known)
        else:
            known, settled = self._detokenizer.text, self._detokenizer.count
            limit = len(known) - self._undecided(known)
        self.offsets.add(self.tokens[len(self.offsets.starts) : settled], known)
        if self._marker is not None and (at := known.find(self._marker, len(self.text))) >= 0:
            limit = min(limit, at)
        return self._send(known[:limit])

    def end(self, text: str) -> str:
        """Returns the rest of the whole text."""
        if not text.startswith(self.text):  # the exception of the class
            text = self.text + self._decode(self.tokens[self._detokenizer.count :])
        return self._send(text)

    def _send(self, text: str) -> str:
        new = text[len(self.text) :]
        self.text += new
        self.count = max(self.count, self.offsets.within(len(text)))
        return new

    def _undecided(self, known: str) -> int:
        """Returns the number of last characters that may begin a stop string or the marker."""
        longest = max(map(len, self._withheld), default=1) - 1
        ends = (known[-n:] for n in range(min(longest, len(known) - len(self.text)), 0, -1))
        return next((len(e) for e in ends if any(t.startswith(e) for t in self._withheld)), 0)
