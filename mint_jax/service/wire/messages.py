"""The protobuf messages of the Tinker wire format (package ``tinker_public``, proto3), built from a
table: a server does not depend on the SDK that generates them.

They have their own descriptor pool, so that a process can load the SDK's messages too.
"""

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PACKAGE = "tinker_public"
ENUMS = {
    "StopReason": ("STOP_REASON_STOP", "STOP_REASON_LENGTH"),
    "DType": ("DTYPE_UNSPECIFIED", "DTYPE_FLOAT32", "DTYPE_INT64", "DTYPE_INT32", "DTYPE_BFLOAT16"),
}
# message -> fields: number, name, type; `*` repeated, `?` distinct from its default, `map:` of
# strings to it, `type|name` one of `name`
MESSAGES = {
    "SampleResponse": (
        """1 sequences *SampledSequence, 2 prompt_logprobs ?bytes, 3 topk_prompt_logprobs ?TopkLogprobs,
        4 prompt_cache_hit_tokens int32, 5 target_prompt_logprobs ?Tensor, 6 prompt_alt_tokens ?PromptAltTokens"""  # noqa: E501
    ),
    "PromptAltTokens": "1 tokens Tensor, 2 logprobs Tensor",
    "SampledSequence": (
        "1 stop_reason StopReason, 2 tokens bytes, 3 logprobs ?bytes, 4 topk_sampled_logprobs"
        " ?TopkLogprobs"
    ),
    "TopkLogprobs": "1 token_ids bytes, 2 logprobs bytes, 3 k uint32, 4 length uint32",
    "SparseCsr": "1 values bytes, 2 crow_indices bytes, 3 col_indices bytes",
    "Tensor": (
        "1 dense bytes|encoding, 2 sparse_csr SparseCsr|encoding, 3 dtype DType, 4 shape *int64"
    ),
    "BatchedTensor": "1 data bytes, 2 offsets bytes, 3 dtype DType, 4 trailing_shape *int64",
    "ArrayRecord": "1 type_tag string, 2 fields map:BatchedTensor, 3 num_datums int64",
    "ForwardBackwardOutput": (
        "1 loss_fn_output_type string, 2 loss_fn_outputs *ArrayRecord, 3 metrics map:double"
    ),
    "ForwardBackwardRequest": (
        """1 model_id string, 2 seq_id int32, 3 data *Datum, 4 loss_fn string, 5 loss_fn_config map:double,
        6 forward_only bool, 7 loss_fn_config_v2 map:LossConfigValue"""  # noqa: E501
    ),
    "LossConfigValue": "1 number double|value, 2 text string|value",
    "Datum": (
        """1 model_input *Chunk, 2 loss_fn_inputs map:Tensor, 3 model_input_spans *ProvenanceSpan,
        4 loss_fn_input_spans *ProvenanceSpan"""
    ),
    "ProvenanceSpan": (
        "1 prompt_tokens PromptProvenanceSpan|span, 2 sampled_tokens SampledProvenanceSpan|span"
    ),
    "PromptProvenanceSpan": "1 sequence_id string, 2 offset int64, 3 length int64",
    "SampledProvenanceSpan": "1 sequence_id string, 2 offset int64, 3 length int64",
    "Chunk": (
        "1 encoded_text EncodedTextChunk|chunk, 2 image ImageChunk|chunk, 3 dmel DmelChunk|chunk"
    ),
    "EncodedTextChunk": "1 tokens bytes",
    "ImageChunk": (
        "1 data bytes, 2 format string, 3 expected_tokens ?int32, 4 override_dimensions"
        " ?ImageDimensions"
    ),
    "ImageDimensions": "1 width uint32, 2 height uint32",
    "DmelChunk": "1 dmel bytes",
}
_Field = descriptor_pb2.FieldDescriptorProto


def _typed(field: Any, type_name: str) -> None:
    """Sets a field's type from its name in the table."""
    if type_name in MESSAGES or type_name in ENUMS:
        field.type = _Field.TYPE_MESSAGE if type_name in MESSAGES else _Field.TYPE_ENUM
        field.type_name = f".{PACKAGE}.{type_name}"
    else:
        field.type = _Field.Type.Value(f"TYPE_{type_name.upper()}")


def _fill(message: Any, name: str, fields: str) -> None:
    """Writes one row of the table into its descriptor."""
    message.name = name
    optional = []
    for row in fields.split(","):
        number, field_name, kind = row.split()
        field = message.field.add(name=field_name, number=int(number), label=_Field.LABEL_OPTIONAL)
        kind, _, one_of = kind.partition("|")
        if one_of:
            names = [one.name for one in message.oneof_decl]
            if one_of not in names:
                message.oneof_decl.add(name=one_of)
                names.append(one_of)
            field.oneof_index = names.index(one_of)
        if kind.startswith("map:"):
            entry = message.nested_type.add(
                name="".join(part.capitalize() for part in field_name.split("_")) + "Entry"
            )
            entry.options.map_entry = True
            entry.field.add(
                name="key", number=1, label=_Field.LABEL_OPTIONAL, type=_Field.TYPE_STRING
            )
            _typed(
                entry.field.add(name="value", number=2, label=_Field.LABEL_OPTIONAL),
                kind.removeprefix("map:"),
            )
            field.label, field.type, field.type_name = (
                _Field.LABEL_REPEATED,
                _Field.TYPE_MESSAGE,
                f".{PACKAGE}.{name}.{entry.name}",
            )
            continue
        if kind.startswith("*"):
            field.label = _Field.LABEL_REPEATED
        elif kind.startswith("?"):
            field.proto3_optional = True
            optional.append(field)
        _typed(field, kind.lstrip("*?"))
    for field in optional:  # presence is a oneof of one field, after all real ones
        field.oneof_index = len(message.oneof_decl)
        message.oneof_decl.add(name=f"_{field.name}")


def _built() -> descriptor_pool.DescriptorPool:
    file = descriptor_pb2.FileDescriptorProto(
        name="mint_jax/tinker_public.proto", package=PACKAGE, syntax="proto3"
    )
    for name, values in ENUMS.items():
        file.enum_type.add(
            name=name,
            value=[
                descriptor_pb2.EnumValueDescriptorProto(name=v, number=i)
                for i, v in enumerate(values)
            ],
        )
    for name, fields in MESSAGES.items():
        _fill(file.message_type.add(), name, fields)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return pool


POOL = _built()


def _class(name: str) -> Any:
    return message_factory.GetMessageClass(POOL.FindMessageTypeByName(f"{PACKAGE}.{name}"))


ForwardBackwardRequest = _class("ForwardBackwardRequest")
ForwardBackwardOutput = _class("ForwardBackwardOutput")
SampleResponse = _class("SampleResponse")
FLOAT32, INT64, INT32, BFLOAT16 = 1, 2, 3, 4  # of DType
STOP, LENGTH = 0, 1  # of StopReason
