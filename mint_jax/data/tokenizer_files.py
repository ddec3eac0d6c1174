"""Tokenizers built from a checkpoint's files, with the token ids of transformers 5.

``tokenizer.json`` decides (without one, a file of ``READERS``), with three exceptions. Saved
truncation and padding are off. Tokens that only ``tokenizer_config.json`` (or the older
``special_tokens_map.json`` and ``added_tokens.json``) names are added. A ``tokenizer_class`` that
builds its own normalizer and pre-tokenizer uses only vocabulary, merges and post-processor of the
file.
"""

import json
import re
from pathlib import Path
from typing import Any

from mint_jax.data import ranked_tokens, sentence_pieces
from mint_jax.errors import UserError
from mint_jax.files import read_object

READERS = {  # of checkpoints without a tokenizer.json
    "tiktoken.model": ranked_tokens.read_tiktoken,
    "tekken.json": ranked_tokens.read_tekken,
    "tokenizer.model": sentence_pieces.read,
}
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# model type -> class, whatever tokenizer_class says
FORCED = {"qwen2": "Qwen2Tokenizer"}
FORCED |= dict.fromkeys(("qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text"), "Qwen3_5Tokenizer")
# without a tokenizer_class
USUAL = dict.fromkeys(("qwen3", "qwen3_moe", "qwen3_next"), "Qwen2Tokenizer")
USUAL |= {"qwen3_5_text": "Qwen3_5Tokenizer"}
USUAL |= dict.fromkeys(("gemma3", "gemma3_text"), "GemmaTokenizer")
# types that take tokenizer.json as it is, whatever tokenizer_class says
AS_FILE = ("mistral", "mistral3", "ministral", "ministral3", "glm4_moe", "glm4_moe_lite")
DEFAULTS = {  # special tokens of classes that build their own pipeline
    "LlamaTokenizer": {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"},
    "GPT2Tokenizer": dict.fromkeys(("unk_token", "bos_token", "eos_token"), "<|endoftext|>"),
    **dict.fromkeys(
        ("Qwen2Tokenizer", "Qwen3_5Tokenizer"),
        dict.fromkeys(("unk_token", "eos_token", "pad_token"), "<|endoftext|>"),
    ),
    "GemmaTokenizer": {
        f"{name}_token": f"<{name}>" for name in ("unk", "bos", "eos", "pad", "mask")
    },
}
# classes of transformers 5 with their own pipeline that belong to no supported family
UNSUPPORTED = re.compile(
    "(?:Albert|Bart|Barthez|Bert|BigBird|Blenderbot|CLIP|Camembert|CodeGen|CodeLlama|Cohere|Cpm|DPRContextEncoder"
    "|DPRQuestionEncoder|DPRReader|Deberta|DebertaV2|DistilBert|Esmc|Funnel|GPTNeoX|Herbert|Lasr|LayoutLMv2"
    "|LayoutLMv3|LayoutXLM|Luke|MBart|MBart50|MLuke|MPNet|MarkupLM|MobileBert|Nllb|Nougat|OpenAIGPT|Pegasus"
    "|Reformer|RemBert|RoFormer|Roberta|SeamlessM4T|Siglip2|Splinter|SqueezeBert|T5|Tipsv2|Udop|VideoPrism|Whisper"
    "|XGLM|XLMRoberta|XLNet)Tokenizer"
)
# The pre-tokenizers of Qwen: contractions, words (with their marks from 3.5 on), single digits,
# punctuation, line ends, blanks.
QWEN_SPLITS = {
    kind: rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?{word}+|\p{{N}}|"
    rf" ?[^\s{others}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    for kind, word, others in (
        ("Qwen2Tokenizer", r"\p{L}", r"\p{L}"),
        ("Qwen3_5Tokenizer", r"[\p{L}\p{M}]", r"\p{L}\p{M}"),
    )
}


def read(directory: Path) -> tuple[Any, dict[str, str], dict[str, Any]]:
    """Returns a checkpoint's ``tokenizers.Tokenizer``, the text of each named special token, such
    as ``eos_token``, and ``tokenizer_config.json``. Raises ``UserError``: a file is missing or
    unreadable, or a setting has an unsupported effect on text.
    """
    from tokenizers import Tokenizer

    config = read_json(directory / "tokenizer_config.json")
    path, source = _source(directory, config)
    try:
        _keep_blanks(source.get("post_processor"))
        fast = Tokenizer.from_str(json.dumps(source))
    except Exception as error:  # the Rust library raises bare Exception
        raise UserError(
            f"{path} is not a readable tokenizer ({error}): fetch the checkpoint again"
        ) from None
    model = read_json(directory / "config.json")
    kind = _class_of(config, model, source, directory)
    if kind:
        fast = _built(kind, source, fast, config, path)
    elif source.get("model", {}).get("dropout"):
        raise UserError(
            f"{path} has dropout {source['model']['dropout']}, so the tokens of a text are random:"
            " set it to null"
        )
    forced = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
    is_bpe = source.get("model", {}).get("type") == "BPE"
    if config.get("clean_up_tokenization_spaces") and (not is_bpe or config.get(forced)):
        raise UserError(
            f"{directory / 'tokenizer_config.json'} sets clean_up_tokenization_spaces, which takes"
            " blanks out of decoded text and is not supported: set it to false"
        )
    fast.no_truncation()
    fast.no_padding()
    fast.encode_special_tokens = bool(config.get("split_special_tokens", False))
    return fast, _add_tokens(fast, kind, config, model, source, directory), config


def _source(directory: Path, config: dict[str, Any]) -> tuple[Path, dict[str, Any]]:
    """Returns the file that has the tokenizer, and its contents as a ``tokenizer.json``."""
    path = directory / "tokenizer.json"
    if path.is_file():
        return path, read_json(path)
    for name, reader in READERS.items():
        if (directory / name).is_file():
            return directory / name, reader(directory / name, config)
    raise UserError(
        f"{path} does not exist, nor does {' or '.join(READERS)}: give token ids"
        " instead of text, or add the checkpoint's tokenizer.json"
    )


def read_json(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file; empty if the file does not exist."""
    return read_object(path) if path.is_file() else {}


def _keep_blanks(part: Any) -> None:
    """Makes a post-processor include a token's blanks in its offsets."""
    if isinstance(part, dict) and part.get("trim_offsets"):
        part["trim_offsets"] = False
    for one in part.values() if isinstance(part, dict) else part if isinstance(part, list) else ():
        _keep_blanks(one)


def _class_of(
    config: dict[str, Any], model: dict[str, Any], source: dict[str, Any], directory: Path
) -> str:
    """Returns the name of transformers' tokenizer class; empty to take the file as it is."""
    model_type = model.get("model_type", "")
    if model_type in FORCED or model_type in AS_FILE:
        return FORCED.get(model_type, "")
    kind = str(config.get("tokenizer_class") or model.get("tokenizer_class") or "")
    kind = kind.removesuffix("Fast") or USUAL.get(model_type, "")
    if kind == "LlamaTokenizer" and '"ByteLevel"' in json.dumps(source):
        return ""  # its own pipeline is SentencePiece's; Llama 3 and DeepSeek name it all the same
    if UNSUPPORTED.fullmatch(kind):
        raise UserError(
            f"tokenizer_class in {directory / 'tokenizer_config.json'} is {kind}, which builds a"
            " pipeline of its own that is not supported: set it to PreTrainedTokenizerFast to take"
            " tokenizer.json as it is"
        )
    return kind if kind in DEFAULTS else ""


def _built(kind: str, source: dict[str, Any], fast: Any, config: dict[str, Any], path: Path) -> Any:
    """Builds a class's pipeline around the file's vocabulary, merges and post-processor."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    model = source["model"]
    if model.get("type") != "BPE":
        raise UserError(
            f"{path} is a {model.get('type')} model, but its tokenizer_class {kind} is BPE: set"
            " tokenizer_class to PreTrainedTokenizerFast in tokenizer_config.json to take the file"
            " as it is"
        )
    pairs = (one.split(" ") if isinstance(one, str) else one for one in model.get("merges", []))
    merges: Any = list(map(tuple, pairs))
    is_llama, prefix = kind == "LlamaTokenizer", config.get("add_prefix_space")
    is_gemma = kind == "GemmaTokenizer"
    by_piece = is_llama or is_gemma  # characters, and bytes where the vocabulary lacks one
    unknown: Any = {}
    if is_gemma:
        text = _token(config.get("unk_token", "<unk>"), special=True).content
        if text not in model["vocab"]:
            raise UserError(
                f"{path} lacks the unk_token {text!r} of its tokenizer_class {kind}: name one that"
                " it has in tokenizer_config.json"
            )
        unknown = {"unk_token": text}
    how: Any = {"fuse_unk": by_piece, "byte_fallback": by_piece, **unknown}
    built: Any = Tokenizer(models.BPE(vocab=model["vocab"], merges=merges, **how))
    if is_llama:
        prefix = prefix is None or prefix
        scheme = "never" if not prefix else "always" if config.get("legacy", False) else "first"
        how = {"prepend_scheme": scheme, "split": False}
        built.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", **how)
    elif is_gemma:
        built.normalizer = normalizers.Replace(" ", "▁")
        built.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    if by_piece:
        parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        strip = [decoders.Strip(content=" ", left=1)] if is_llama and prefix else []
        built.decoder = decoders.Sequence(parts + strip)
    else:
        how = {"add_prefix_space": bool(prefix), "use_regex": kind == "GPT2Tokenizer"}
        bytes_: Any = pre_tokenizers.ByteLevel(**how)
        if kind in QWEN_SPLITS:
            built.normalizer = normalizers.NFC()
            split = pre_tokenizers.Split(Regex(QWEN_SPLITS[kind]), "isolated")
            bytes_ = pre_tokenizers.Sequence([split, bytes_])
        built.pre_tokenizer, built.decoder = bytes_, decoders.ByteLevel()
    if fast.post_processor is not None:
        built.post_processor = fast.post_processor
    return built


def _add_tokens(
    fast: Any,
    kind: str,
    config: dict[str, Any],
    model: dict[str, Any],
    source: dict[str, Any],
    directory: Path,
) -> dict[str, str]:
    """Adds the tokens that other files name, in the order that gives them transformers' ids."""
    listed = config.get("added_tokens_decoder")
    if listed is None:
        config = config | read_json(directory / "special_tokens_map.json")
    given = DEFAULTS.get(kind, {}) | {n: v for n, v in config.items() if n.endswith("_token")}
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    if isinstance(extra, dict):
        given, extra = given | extra, []
    texts = {name: given[name] for name in (*NAMED, *given) if name in given}
    tokens_of = {name: _token(value, special=True) for name, value in texts.items()}
    named = {name: token for name, token in tokens_of.items() if token is not None}
    further = [_token(value, special=True) for value in extra]
    special = [token for token in (*named.values(), *further) if token is not None]
    specials = {token.content for token in special}

    if listed is None:
        by_id = {
            id: {"content": text, "special": text in specials, "normalized": text not in specials}
            for text, id in read_json(directory / "added_tokens.json").items()
        }
        by_id |= {token["id"]: token for token in source.get("added_tokens", [])}
    else:
        by_id = {int(id): value for id, value in listed.items()}
    texts = {token.content for token in named.values()}
    tokens = {}
    for _, value in sorted(by_id.items()):
        tokens[value["content"]] = _token(value, special=value["content"] in texts)
    present = {token.content for token in fast.get_added_tokens_decoder().values()}
    for token in special:
        if token.content not in present:
            tokens.setdefault(token.content, token)
    if kind == "Qwen2Tokenizer":
        tokens |= {text: _token(text, special=True) for text in tokens if text in specials}

    # tokens beyond the rows of the model's embedding stay out
    rows = model.get("vocab_size") or (model.get("text_config") or {}).get("vocab_size")
    vocab, kept = fast.get_vocab(), []
    size = max(vocab.values(), default=-1) + 1
    for text, token in tokens.items():
        is_new = text not in vocab
        if not is_new or rows is None or size < rows:
            kept.append(token)
            size += is_new
    fast.add_tokens(kept)
    return {name: token.content for name, token in named.items()}


def _token(value: Any, special: bool) -> Any:
    """Returns a token given as text or with its flags; None for other values."""
    from tokenizers import AddedToken

    if isinstance(value, str):
        return AddedToken(value, special=special)
    if not isinstance(value, dict) or not isinstance(value.get("content"), str):
        return None
    names = ("single_word", "lstrip", "rstrip", "normalized")
    flags = {name: value[name] for name in names if name in value}
    return AddedToken(value["content"], **flags, special=special or value.get("special", False))
