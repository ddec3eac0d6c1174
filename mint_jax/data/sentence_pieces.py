"""SentencePiece's ``tokenizer.model`` as the JSON of a ``tokenizer.json``: pieces and merges only.
The checkpoint's tokenizer class defines how text is normalized and split.
"""

from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message, message_factory

from mint_jax.data.ranked_tokens import added, around_texts
from mint_jax.errors import UserError

BPE, CONTROL, USER_DEFINED = 2, 3, 4
CLASSES = ("LlamaTokenizer", "GemmaTokenizer")


def _message() -> Any:
    """Returns the part of ``sentencepiece_model.proto`` that is read."""
    file = descriptor_pb2.FileDescriptorProto(
        name="mint_jax/sentence_pieces.proto", syntax="proto2"
    )
    form = descriptor_pb2.FieldDescriptorProto
    for name, fields in {
        "Piece": (("piece", 1, form.TYPE_STRING), ("type", 3, form.TYPE_INT32)),
        "Trainer": (("model_type", 3, form.TYPE_INT32),),
        "Model": (("pieces", 1, ".Piece"), ("trainer_spec", 2, ".Trainer")),
    }.items():
        made = file.message_type.add(name=name)
        for field, number, kind in fields:
            one = made.field.add(name=field, number=number, label=form.LABEL_OPTIONAL)
            if isinstance(kind, str):
                one.type_name, one.type = kind, form.TYPE_MESSAGE
            else:
                one.type = kind
            if field == "pieces":
                one.label = form.LABEL_REPEATED
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("Model"))


def read(path: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Returns the vocabulary in a ``tokenizer.model``. Raises ``UserError``: it is none, its model
    is not BPE, or its class is none of ``CLASSES``.
    """
    kind = str(config.get("tokenizer_class")).removesuffix("Fast")
    if kind not in CLASSES:
        raise UserError(
            f"{path} is read for the tokenizer_class {' or '.join(CLASSES)}, and"
            f" tokenizer_config.json says {kind}: add the checkpoint's tokenizer.json"
        )
    try:
        model = _message().FromString(path.read_bytes())
    except message.DecodeError:
        model = None
    if model is None or not model.pieces:
        raise UserError(
            f"{path} is no SentencePiece model: fetch the checkpoint again, or add its"
            " tokenizer.json"
        )
    if model.trainer_spec.model_type != BPE:
        raise UserError(
            f"{path} has model_type {model.trainer_spec.model_type}, expected {BPE} (BPE): add the"
            " checkpoint's tokenizer.json"
        )
    vocab = {one.piece: id for id, one in enumerate(model.pieces)}
    listed = [
        added(id, one.piece, one.type == CONTROL)
        for id, one in enumerate(model.pieces)
        if one.type in (CONTROL, USER_DEFINED)
    ]
    merges = [
        [piece[:i], piece[i:]]
        for piece in vocab
        for i in range(1, len(piece))
        if piece[:i] in vocab and piece[i:] in vocab
    ]
    source: dict[str, Any] = {"version": "1.0", "added_tokens": listed, "normalizer": None}
    source |= {"pre_tokenizer": None, "post_processor": _ends(config, vocab, path), "decoder": None}
    return source | {"model": {"type": "BPE", "vocab": vocab, "merges": merges}}


def _ends(config: dict[str, Any], vocab: dict[str, int], path: Path) -> dict[str, Any]:
    """Returns the post-processor that adds the tokens of a text's begin and end."""
    sides: list[dict[str, int]] = [{}, {}]
    for side, name, default in zip(sides, ("bos", "eos"), ("<s>", "</s>")):
        value = config.get(f"{name}_token", default)
        text = value.get("content") if isinstance(value, dict) else value
        if not config.get(f"add_{name}_token") or text is None:
            continue
        if text not in vocab:
            raise UserError(
                f"{path} lacks the {name}_token {text!r} of tokenizer_config.json: name one of its"
                " tokens"
            )
        side[text] = vocab[text]
    return around_texts(*sides)
