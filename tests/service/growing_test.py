"""Text as it grows: all that is told is the whole text, and nothing that was told is taken back."""

import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models

from mint_jax.data.tokenizer import Tokenizer
from mint_jax.models import base as base_lib
from mint_jax.rollout.stops import Stops
from mint_jax.service.growing import HALF, Growing, TokenTexts


@pytest.fixture(scope="module")
def byte_level():
    return Tokenizer(base_lib.resolve("tiny-random"))


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory):
    """As SentencePiece's: bytes for characters that have no token, a low line for a blank."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"\N{LOWER ONE EIGHTH BLOCK}": 256, "a": 257, "b": 258, "é": 259}
    fast = FastTokenizer(models.BPE(vocab, [], byte_fallback=True))
    fast.decoder = decoders.Sequence([decoders.Replace("\N{LOWER ONE EIGHTH BLOCK}", " "), decoders.ByteFallback(), decoders.Fuse()])
    folder = tmp_path_factory.mktemp("fallback")
    fast.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


def told(growing, tokens, cuts, final):
    """What is told of tokens that come in pieces, the last being what ``end`` tells."""
    out, ends = [], [*cuts, len(tokens)]
    for begin, end in zip([0, *cuts], ends):
        count, text = growing.add(tokens[begin:end])
        out.append(text)
        if count < end - begin:
            break
    return [*out, growing.end(final(growing.tokens))]


def cuts_of(rng, tokens):
    return sorted(rng.choice(len(tokens) + 1, int(rng.integers(0, 8))).tolist())


def test_pieces_are_the_text_and_end_with_whole_characters(rng, byte_level):
    pool = byte_level.encode("日本語 😀👍🏽 é ü a b  \n<|im_end|> наука 中") + rng.integers(0, 49152, 20).tolist()
    for _ in range(300):
        tokens = rng.choice(pool, int(rng.integers(1, 40))).tolist()
        pieces = told(Growing(byte_level.decode), tokens, cuts_of(rng, tokens), byte_level.decode)
        assert "".join(pieces) == byte_level.decode(tokens)
        assert not any(piece.endswith(HALF) for piece in pieces[:-1])


def test_pieces_of_whole_characters_by_bytes_are_the_text(rng, byte_fallback):
    for _ in range(200):
        text = "".join(rng.choice(list("ab é😀日本"), int(rng.integers(1, 20))).tolist())
        tokens = byte_fallback.encode(text)
        pieces = told(Growing(byte_fallback.decode), tokens, cuts_of(rng, tokens), byte_fallback.decode)
        assert "".join(pieces) == byte_fallback.decode(tokens)
        assert not any(HALF in piece for piece in pieces)


def test_no_part_of_a_stop_string_is_told(rng, byte_level):
    letters = [81, 82, 83, *byte_level.encode(" a"), *byte_level.encode("日")]
    stopped = 0
    for _ in range(400):
        stop = ["".join(rng.choice(list("abc 日"), int(rng.integers(1, 5))).tolist()) for _ in range(int(rng.integers(1, 4)))]
        tokens = rng.choice(letters, int(rng.integers(1, 40))).tolist()
        end, whole = Stops(byte_level.decode, stop).look(tokens)
        growing = Growing(byte_level.decode, stop)
        pieces = told(growing, tokens, cuts_of(rng, tokens), lambda kept, whole=whole: byte_level.decode(kept) if whole is None else whole)
        assert "".join(pieces) == (byte_level.decode(tokens) if whole is None else whole)
        assert growing.tokens == tokens[:end]
        stopped += end is not None
    assert 50 < stopped < 400


def test_from_a_marker_on_all_is_kept_for_the_end(rng, byte_level):
    text = "Let me look. <tool_call>{}</tool_call>"
    tokens = byte_level.encode(text)
    for _ in range(30):
        pieces = told(Growing(byte_level.decode, (), "<tool_call>"), tokens, cuts_of(rng, tokens), lambda _: text)
        assert "Let me look. ".startswith("".join(pieces[:-1]))
        assert "".join(pieces) == text
    assert told(Growing(byte_level.decode, (), ""), tokens, [3, 5], lambda _: text) == ["", "", "", text]


def test_bytes_of_tokens_are_the_texts(rng, byte_level, byte_fallback):
    for tokenizer, text in ((byte_level, "An été 😀 日本\t<|im_end|>\x00"), (byte_fallback, "ab é 😀日")):
        texts, tokens = TokenTexts(tokenizer), tokenizer.encode(text)
        assert b"".join(map(texts.bytes_of, tokens)).decode() == text
    texts = TokenTexts(byte_level)
    half = byte_level.encode("😀")[-1]
    assert texts.text_of(half).startswith("bytes:\\x")
    assert texts.text_of(81) == "a"
    assert texts.bytes_of(10**6) == b""
