"""Files of ranked byte sequences against tiktoken, the tool of their makers: Kimi's tokenizer is a
``tiktoken.Encoding``, and mistral-common's encodes by one.
"""

import base64
import json

import pytest
import tiktoken
from transformers.integrations.mistral.tokenizer import MistralConverter

from mint_jax.data.tokenizer import Tokenizer
from mint_jax.errors import UserError

SCRIPTS = {
    "Latin": "The quick brown foxes DON'T jump; l'été, Straße, naïve ﬁ 12345 3.14",
    "Cyrillic": "Съешь же ещё этих мягких булок",
    "Greek": "Ξεσκεπάζω τὴν ψυχοφθόρα",
    "Han": "我能吞下玻璃而不伤身体。漢字かな mixed中文English混合",
    "kana": "いろはにほへと チリヌルヲ",
    "Hangul": "다람쥐 헌 쳇바퀴에",
    "Arabic": "نص حكيم له سر قاطع ١٢٣",
    "Hebrew": "דג סקרן שט בים",
    "Devanagari": "ऋषियों को सताने वाले १२३",
    "Bengali": "বিষণ্ন ঔদাসীন্যে",
    "Tamil": "யாமறிந்த மொழிகளிலே",
    "Telugu": "దేశ భాషలందు తెలుగు",
    "Thai": "เป็นมนุษย์สุดประเสริฐ",
    "Lao": "ຂອບໃຈຫຼາຍໆ",
    "Khmer": "ខ្ញុំអាចញ៉ាំកញ្ចក់បាន",
    "Burmese": "ကျွန်တော် ကျွန်မ",
    "Georgian": "ვეპხის ტყაოსანი",
    "Armenian": "Կրնամ ապակի ուտել",
    "Amharic": "ሰው እንደቤቱ",
    "Tibetan": "ཤེལ་སྒོ་ཟ་ནས་ང་",
    "symbols": "🙂🇫🇷👩‍👩‍👧 ∀x∈ℝ: ⌈x⌉ = −⌊−x⌋  \t\n\n  \r\n x\u200b\x00\ufffd",
    "code": "def f(x):\n    return x**2  # 'quoted' \"text\"\n\n\n\tprint(f(10_000))",
}
SPECIAL = ["[BOS]", "[EOS]", "<|im_end|>"]
PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# as tokenization_kimi.py of the published models has it
KIMI = (
    r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def ranks_of(rng, count=900):
    """Ranks of all bytes and of unions of two earlier tokens that occur in the texts."""
    texts = [text.encode() for text in SCRIPTS.values()]
    ranks = {bytes([byte]): byte for byte in rng.permutation(256)}
    ranks = {token: rank for rank, token in enumerate(ranks)}
    while len(ranks) < 256 + count:
        text = texts[rng.integers(len(texts))]
        start, size = rng.integers(len(text)), rng.integers(2, 7)
        token = text[start : start + size]
        if any(token[:i] in ranks and token[i:] in ranks for i in range(1, len(token))):
            ranks.setdefault(token, len(ranks))
    return ranks


def texts_of(rng):
    pieces = [*SCRIPTS.values(), *SPECIAL, "<|reserved_token_1200|>", " ", "\n", "aaaaaaa"]
    yield from ("", *pieces)
    for _ in range(200):
        chosen = rng.choice(pieces, rng.integers(1, 4))
        yield "".join(text[rng.integers(len(text)) :][: rng.integers(1, 30)] for text in chosen)


def assert_as_encoding(mine, encoding, rng, first=0, begin=()):
    for text in texts_of(rng):
        theirs = encoding.encode(text, allowed_special="all", disallowed_special=())
        ids = [first + id for id in theirs]
        assert mine.encode(text) == [*begin, *ids], text
        assert mine.encode(text, special=False) == ids
        if not first:
            assert mine.decode(ids, skip_special=False) == encoding.decode(theirs)


def write_kimi(directory, ranks, **config):
    lines = [base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items()]
    (directory / "tiktoken.model").write_bytes(b"".join(lines))
    listed = {len(ranks) + i: {"content": text, "special": True} for i, text in enumerate(SPECIAL)}
    config = {"added_tokens_decoder": listed, "eos_token": "[EOS]", "bos_token": "[BOS]"} | config
    config = {"tokenizer_class": "TikTokenTokenizer"} | config
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def test_kimis_files_give_the_tokens_of_tiktoken(tmp_path, rng):
    ranks = ranks_of(rng)
    first = len(ranks)
    special = {f"<|reserved_token_{id}|>": id for id in range(first + len(SPECIAL), first + 256)}
    special |= {text: first + i for i, text in enumerate(SPECIAL)}
    how = {"pat_str": KIMI, "mergeable_ranks": ranks, "special_tokens": special}
    encoding = tiktoken.Encoding("kimi", **how)
    mine = Tokenizer(write_kimi(tmp_path, ranks))
    assert_as_encoding(mine, encoding, rng)
    assert mine.vocab_size == encoding.n_vocab
    assert (mine.eos_id, mine.special_ids["<|im_end|>"]) == (first + 1, first + 2)
    ids = mine.encode("a[EOS]<|im_end|>")
    assert mine.decode(ids, skip_special=True) == "a"


CONTROL = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "<pad>"]


def tekken(ranks):
    coded = ((rank, base64.b64encode(token).decode()) for token, rank in ranks.items())
    vocab = [{"rank": rank, "token_bytes": text, "token_str": None} for rank, text in coded]
    special = [{"rank": i, "token_str": text, "is_control": True} for i, text in enumerate(CONTROL)]
    size = len(ranks) + 20 - 7  # published files have more tokens than the model
    config = {"pattern": PATTERN, "num_vocab_tokens": len(ranks), "version": "v7"}
    config |= {"default_vocab_size": size, "default_num_special_tokens": 20}
    return {"config": config, "vocab": vocab, "special_tokens": special}


@pytest.mark.parametrize("template", [False, True])
def test_tekken_files_give_the_tokens_of_their_maker(tmp_path, rng, template):
    ranks = ranks_of(rng)
    (tmp_path / "tekken.json").write_text(json.dumps(tekken(ranks)))
    if template:
        (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}[INST]")
    kept = {token: rank for token, rank in ranks.items() if rank < len(ranks) - 7}
    encoding = tiktoken.Encoding("tekken", pat_str=PATTERN, mergeable_ranks=kept, special_tokens={})
    mine = Tokenizer(tmp_path)
    assert_as_encoding(mine, encoding, rng, first=20, begin=(1,))
    assert (mine.eos_id, mine.vocab_size) == (2, len(ranks) + 13)
    theirs = MistralConverter(str(tmp_path / "tekken.json")).converted()
    assert mine.decode(mine.encode("é 漢 x")) == "é 漢 x"
    for text in ("a[INST]b</s>", "<pad> [/INST]\n"):
        control = theirs.encode(text).ids
        plain = [20 + id for id in encoding.encode(text)]
        assert mine.encode(text, special=False) == (control if template else plain)
    if template:
        messages = [{"role": "user", "content": "two"}]
        assert mine.encode_chat(messages, generation_prompt=False) == theirs.encode("two[INST]").ids


def broken(change):
    def write(directory, ranks):
        found = tekken(ranks)
        change(found)
        (directory / "tekken.json").write_text(json.dumps(found))

    return write


def text(content):
    return lambda directory, ranks: (directory / "tekken.json").write_text(content)


def kimi(lines=None, **config):
    def write(directory, ranks):
        write_kimi(directory, {t: r for t, r in ranks.items() if config or r != 400}, **config)
        if lines is not None:
            (directory / "tiktoken.model").write_bytes(lines)

    return write


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (broken(lambda f: f.pop("special_tokens")), "lists no special_tokens"),
        (broken(lambda f: f["config"].pop("pattern")), "KeyError: 'pattern'"),
        (broken(lambda f: f["vocab"][3].update(rank=2)), "ranks are not 0, 1, 2"),
        (broken(lambda f: f["vocab"][300].update(f["vocab"][299], rank=300)), "there twice"),
        (broken(lambda f: f["vocab"].pop(0)), "ranks are not 0, 1, 2"),
        (broken(lambda f: f["vocab"][9].update(token_bytes="a")), "not a readable"),
        (text("[]"), "TypeError"),
        (text('{"config'), "not a readable"),
        (kimi(tokenizer_class="QwenTokenizer"), "tokenizer_config.json has 'QwenTokenizer'"),
        (kimi(b"YQ==\n"), "is no token and rank"),
        (kimi(), "ranks are not 0, 1, 2"),
    ],
)
def test_broken_files_are_refused(tmp_path, rng, write, message):
    write(tmp_path, ranks_of(rng, 200))
    with pytest.raises(UserError, match=message):
        Tokenizer(tmp_path)
