"""Streaming text of a completion, and the text of each token."""

import bisect
import json
import re
from collections.abc import Sequence
from typing import Any

from mint_jax.data.tokenizer import Tokenizer
from mint_jax.rollout.detokenize import HALF, Decode, Detokenizer, text_behind
from mint_jax.rollout.stops import Stops

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenTexts:
    """The bytes of each token id, which may be part of a character."""

    def __init__(self, tokenizer: Tokenizer):
        source = json.loads(tokenizer.sources[0])
        vocab: Any = source["model"]["vocab"]
        self._pieces: dict[int, str] = (
            {i: piece for piece, i in vocab.items()}
            if isinstance(vocab, dict)
            else {i: entry[0] for i, entry in enumerate(vocab)}
        )
        self._bytes: dict[int, bytes] = {
            token["id"]: token["content"].encode() for token in source["added_tokens"]
        }
        self._is_byte_level = "ByteLevel" in json.dumps(source.get("decoder"))
        self._decode, self._before = tokenizer.decode, tokenizer.encode("a", special=False)[-1:]
        self.special = set(tokenizer.special_ids.values())

    def bytes_of(self, token: int) -> bytes:
        """Returns a token's bytes behind other text; empty for an id that the tokenizer does not
        have.
        """
        if token not in self._bytes:
            piece = self._pieces.get(token)
            if piece is None:
                return b""
            if self._is_byte_level:
                data = b"".join(
                    bytes((_ALPHABET[char],)) if char in _ALPHABET else char.encode()
                    for char in piece
                )
            elif (byte := _BYTE.fullmatch(piece)) is not None:
                data = bytes.fromhex(byte[1])
            else:
                data = text_behind(self._decode, self._before, [token]).encode()
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


class Places:
    """Offsets of tokens in a text, in characters.

    Args:
        shown: special tokens are part of the text, as in prompts.

    Attributes:
        begins: offset of each token's first character; for the rest of a split character, the
            offset after it.
        chars: offset of the character that has each token's first byte.
    """

    def __init__(self, texts: TokenTexts, shown: bool = False):
        self._texts, self._shown, self._next = texts, shown, 0
        self.begins: list[int] = []
        self.chars: list[int] = []

    def add(self, tokens: Sequence[int], text: str) -> None:
        """Adds tokens.

        Args:
            text: all known text, which decides which blanks and special tokens it includes.
        """
        for token in tokens:
            data = self._texts.bytes_of(token)
            if token in self._texts.special and not (
                self._shown and data.decode() in text[self._next : self._next + len(data) + 1]
            ):
                data = b""
            part = data.decode(errors="replace")
            # tokenizers add and drop blanks at the start of words
            if HALF not in part and not text.startswith(part, self._next):
                if text.startswith(" " + part, self._next):
                    self._next += 1
                elif part.startswith(" ") and text.startswith(part[1:], self._next):
                    data = data[1:]
            self.begins.append(self._next)
            self.chars.append(self._next - (not _begins_character(data[:1])))
            self._next += sum(_begins_character(data[i : i + 1]) for i in range(len(data)))

    def within(self, length: int) -> int:
        """Returns how many of the tokens belong to the text's first ``length`` characters."""
        return bisect.bisect_left(self.chars, length)


def _begins_character(byte: bytes) -> bool:
    return not byte or byte[0] & 0xC0 != 0x80


class Growing:
    """One completion's text while it is streamed. Streamed text is final: part of a character
    waits, and so does text that may begin a stop string.

    All pieces together are the completion's text. There is one exception: a byte-fallback tokenizer
    decodes a whole run of bytes as unknown if the run ends within a character, but the earlier
    characters of the run were streamed as they are.

    Args:
        decode: returns the text of token ids.
        texts: text of each token.
        prompt: token ids before the completion.
        stop: strings that end it.
        marker: text from which on everything waits for ``end``; empty: everything waits.
    """

    def __init__(
        self,
        decode: Decode,
        texts: TokenTexts,
        prompt: Sequence[int] = (),
        stop: Sequence[str] = (),
        marker: str | None = None,
    ):
        self._decode, self._marker = decode, marker
        self._stops = Stops(decode, stop, prompt) if stop else None
        self._detokenizer = (
            self._stops.detokenizer if self._stops is not None else Detokenizer(decode, prompt)
        )
        self._withheld = tuple(stop) if not marker else (*stop, marker)
        self._ended: str | None = None  # the text before a stop string, once there is one
        self.tokens: list[int] = []  # up to the one that completes a stop string
        self.places = Places(texts)
        self.told, self.tokens_told = "", 0

    def add(self, tokens: Sequence[int]) -> tuple[int, str]:
        """Returns the number of further tokens and the further text that can be streamed."""
        self.tokens += tokens
        if self._stops is not None:
            end, self._ended = self._stops.look(self.tokens)
            if end is not None:
                del self.tokens[end:]
        else:
            self._detokenizer.settle(self.tokens, self._detokenizer.added(self.tokens))
        known = self._detokenizer.text if self._ended is None else self._ended
        settled = len(self.tokens) if self._ended is not None else self._detokenizer.count
        self.places.add(self.tokens[len(self.places.begins) : settled], known)
        found = -1 if self._marker is None else known.find(self._marker, len(self.told))
        limit = len(known) if found < 0 else found
        return self._tell(
            known[
                : limit if self._ended is not None else min(limit, len(known) - self._open(known))
            ]
        )

    def end(self, text: str) -> str:
        """Returns the rest of the whole text."""
        # see the class: the rest of the run is unknown bytes
        if not text.startswith(self.told):
            text = self.told + self._decode(self.tokens[self._detokenizer.count :])
        return self._tell(text)[1]

    def _tell(self, text: str) -> tuple[int, str]:
        new, count = text[len(self.told) :], self.places.within(len(text)) - self.tokens_told
        self.told, self.tokens_told = self.told + new, self.tokens_told + max(0, count)
        return max(0, count), new

    def _open(self, known: str) -> int:
        """Returns how many characters at the end may begin a stop string or the marker."""
        untold = len(known) - len(self.told)
        for count in range(min(max(map(len, self._withheld), default=1) - 1, untold), 0, -1):
            if any(text.startswith(known[-count:]) for text in self._withheld):
                return count
        return 0


def _unicode_of_bytes() -> dict[str, int]:
    """Returns GPT-2's alphabet: printable bytes are themselves, the rest count from 256."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + n): byte for n, byte in enumerate(rest)}


_ALPHABET = _unicode_of_bytes()
