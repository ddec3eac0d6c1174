"""Tokenizers of ranked byte sequences, as the JSON of a ``tokenizer.json``: ``tiktoken.model`` of
Kimi and ``tekken.json`` of Mistral.

A text is cut by a pattern; in each piece the two neighbours whose union has the lowest rank are
joined, until no union has a rank. Byte-pair merges in the order of their unions do the same.
"""

import base64
import json
from pathlib import Path
from typing import Any

from mint_jax.errors import UserError

RESERVED = 256  # ids of Kimi's special tokens, named or not
_WORD = "[^\\r\\n\\p{L}\\p{N}]?"
_UPPER, _LOWER = (
    f"[{kinds}\\p{{Lm}}\\p{{Lo}}\\p{{M}}&&[^\\p{{Han}}]]" for kinds in ("\\p{Lu}\\p{Lt}", "\\p{Ll}")
)
_SUFFIX = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
# Chinese characters, words whose capitals come first, up to three digits, punctuation, blanks
_KEYS = ("pattern", "default_vocab_size", "default_num_special_tokens")  # of a tekken.json
KIMI_PATTERN = "|".join(
    (
        "[\\p{Han}]+",
        f"{_WORD}{_UPPER}*{_LOWER}+{_SUFFIX}",
        f"{_WORD}{_UPPER}+{_LOWER}*{_SUFFIX}",
        "\\p{N}{1,3}",
        " ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*",
        "\\s*[\\r\\n]+",
        "\\s+(?!\\S)",
        "\\s+",
    )
)


def read_tiktoken(path: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Returns the tokenizer in a ``tiktoken.model``, whose pattern is known for Kimi's class."""
    if config.get("tokenizer_class") != "TikTokenTokenizer":
        raise UserError(
            f"{path} does not contain its pattern, which is known for the tokenizer_class"
            " 'TikTokenTokenizer' only; tokenizer_config.json has"
            f" {config.get('tokenizer_class')!r}: add the checkpoint's tokenizer.json"
        )
    ranks: dict[bytes, int] = {}
    for line in path.read_bytes().splitlines():
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError:
            raise _unreadable(path, f"the line {line[:40]!r} is no token and rank") from None
    first = len(ranks)
    listed = {int(id): one for id, one in (config.get("added_tokens_decoder") or {}).items()}
    special = [
        added(id, listed.get(id, {}).get("content", f"<|reserved_token_{id}|>"))
        for id in range(first, first + RESERVED)
    ]
    return _source(path, ranks, 0, KIMI_PATTERN, special)


def read_tekken(path: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Returns the tokenizer in a ``tekken.json``. Names its special tokens in ``config``; unless
    there is a chat template, text is never read as special tokens, as in mistral-common.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        pattern, vocab, size = (found["config"][name] for name in _KEYS)
        named = {one["rank"]: one["token_str"] for one in found.get("special_tokens") or ()}
        tokens = [base64.b64decode(one["token_bytes"]) for one in found["vocab"]]
        order = [one["rank"] for one in found["vocab"]]
    except (ValueError, KeyError, TypeError) as error:
        raise _unreadable(path, f"{type(error).__name__}: {error}") from None
    if not named:
        raise UserError(
            f"{path} lists no special_tokens, as files before version 7: add the checkpoint's"
            " tokenizer.json"
        )
    if order != list(range(len(order))) or sorted(named) != list(range(len(named))):
        raise _unreadable(path, "its ranks are not 0, 1, 2, ..")
    special = [added(id, named.get(id, f"<SPECIAL_{id}>")) for id in range(max(size, len(named)))]
    # the file has more tokens than the model
    ranks = {token: rank for rank, token in enumerate(tokens[: vocab - len(special)])}
    present = {one["content"]: one["id"] for one in special}
    for name, text in {"bos": "<s>", "eos": "</s>", "pad": "<pad>", "unk": "<unk>"}.items():
        if text in present:
            config.setdefault(f"{name}_token", text)
    has_template = "chat_template" in config or (path.parent / "chat_template.jinja").exists()
    config.setdefault("split_special_tokens", not has_template)
    source = _source(path, ranks, len(special), pattern, special)
    if "<s>" in present:
        source["post_processor"] = around_texts({"<s>": present["<s>"]}, {})
    return source


def _unreadable(path: Path, reason: str) -> UserError:
    return UserError(f"{path} is not a readable tokenizer ({reason}): fetch the checkpoint again")


def added(id: int, text: str, special: bool = True) -> dict[str, Any]:
    """Returns an added token in the form of a ``tokenizer.json``."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": id, "content": text, **flags, "special": special}


def around_texts(begin: dict[str, int], end: dict[str, int]) -> dict[str, Any]:
    """Returns the post-processor that adds these tokens, with their ids, around a text."""
    first, second = ({"Sequence": {"id": name, "type_id": i}} for i, name in enumerate("AB"))
    front, back = (
        [{"SpecialToken": {"id": text, "type_id": 0}} for text in side] for side in (begin, end)
    )
    single = [*front, first, *back]
    used = {t: {"id": t, "ids": [id], "tokens": [t]} for t, id in (begin | end).items()}
    pair = [*single, second]  # the library wants one
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": used}


def _source(
    path: Path, ranks: dict[bytes, int], first: int, pattern: str, special: list[dict[str, Any]]
) -> dict[str, Any]:
    """Returns the JSON of a tokenizer whose ids are the ranks, from ``first``."""
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise _unreadable(path, "its ranks are not 0, 1, 2, .., or a token stands there twice")
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise _unreadable(path, f"it lacks the byte {missing[0]}")
    letters = _letters()

    def spelled(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    merges = []
    for token, _ in sorted(ranks.items(), key=lambda item: item[1]):
        parts = ((token[:i], token[i:]) for i in range(1, len(token)))
        pairs = [(ranks[a], ranks[b], a, b) for a, b in parts if a in ranks and b in ranks]
        merges += [[spelled(a), spelled(b)] for _, _, a, b in sorted(pairs)]
    vocab = {one["content"]: one["id"] for one in special}
    vocab |= {spelled(token): first + rank for token, rank in ranks.items()}
    model = {"type": "BPE", "vocab": vocab, "merges": merges, "ignore_merges": True}
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
    by_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    by_bytes |= {"use_regex": False}
    return {
        "version": "1.0",
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [split | {"invert": False}, by_bytes],
        },
        "post_processor": None,
        "decoder": by_bytes,
        "model": model,
    }


def _letters() -> list[str]:
    """Returns the printable character by which GPT-2's byte-level vocabularies write each byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (byte for byte in range(256) if byte not in plain)
    codes = {byte: byte for byte in plain} | {byte: 256 + i for i, byte in enumerate(others)}
    return [chr(codes[byte]) for byte in range(256)]
