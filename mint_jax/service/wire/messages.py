"""The protobuf messages of the Tinker wire format, built from their text, which is that of a
``.proto`` file but for ``oneof``: a server does not depend on the SDK that generates them. Enums
are int32, and images and dMel, which no base here reads, bytes: they have the same encoding.

They have their own descriptor pool, so that a process can load the SDK's messages too.
"""

import re
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

FILE, PACKAGE = "mint_jax/tinker_public.proto", "tinker_public"
PROTO = """
message SampleResponse {
  repeated SampledSequence sequences = 1; optional bytes prompt_logprobs = 2;
  optional TopkLogprobs topk_prompt_logprobs = 3; int32 prompt_cache_hit_tokens = 4;
  optional Tensor target_prompt_logprobs = 5; optional PromptAltTokens prompt_alt_tokens = 6; }
message PromptAltTokens { Tensor tokens = 1; Tensor logprobs = 2; }
message SampledSequence {
  int32 stop_reason = 1; bytes tokens = 2; optional bytes logprobs = 3;
  optional TopkLogprobs topk_sampled_logprobs = 4; }
message TopkLogprobs { bytes token_ids = 1; bytes logprobs = 2; uint32 k = 3; uint32 length = 4; }
message SparseCsr { bytes values = 1; bytes crow_indices = 2; bytes col_indices = 3; }
message Tensor {
  oneof encoding bytes dense = 1; oneof encoding SparseCsr sparse_csr = 2;
  int32 dtype = 3; repeated int64 shape = 4; }
message BatchedTensor {
  bytes data = 1; bytes offsets = 2; int32 dtype = 3; repeated int64 trailing_shape = 4; }
message ArrayRecord {
  string type_tag = 1; map<string, BatchedTensor> fields = 2; int64 num_datums = 3; }
message ForwardBackwardOutput {
  string loss_fn_output_type = 1; repeated ArrayRecord loss_fn_outputs = 2;
  map<string, double> metrics = 3; }
message ForwardBackwardRequest {
  string model_id = 1; int32 seq_id = 2; repeated Datum data = 3; string loss_fn = 4;
  map<string, double> loss_fn_config = 5; bool forward_only = 6;
  map<string, LossConfigValue> loss_fn_config_v2 = 7; }
message LossConfigValue { oneof value double number = 1; oneof value string text = 2; }
message Datum {
  repeated Chunk model_input = 1; map<string, Tensor> loss_fn_inputs = 2;
  repeated ProvenanceSpan model_input_spans = 3; repeated ProvenanceSpan loss_fn_input_spans = 4; }
message ProvenanceSpan {
  oneof span PromptProvenanceSpan prompt_tokens = 1;
  oneof span SampledProvenanceSpan sampled_tokens = 2; }
message PromptProvenanceSpan { string sequence_id = 1; int64 offset = 2; int64 length = 3; }
message SampledProvenanceSpan { string sequence_id = 1; int64 offset = 2; int64 length = 3; }
message Chunk {
  oneof chunk EncodedTextChunk encoded_text = 1; oneof chunk bytes image = 2;
  oneof chunk bytes dmel = 3; }
message EncodedTextChunk { bytes tokens = 1; }
"""
_FIELD = re.compile(r"(repeated|optional|oneof \w+|) ?(map<string, )?(\w+)>? (\w+) = (\d+);")


def _fill(message: Any, text: str) -> None:
    """Adds the fields of a message's text."""
    oneofs: list[str] = []
    for label, is_map, kind, name, number in _FIELD.findall(text):
        if is_map:  # a repeated message of a key and a value
            entry = message.nested_type.add(name=name.title().replace("_", "") + "Entry")
            entry.options.map_entry = True
            _fill(entry, f"string key = 1; {kind} value = 2;")
            kind = f"{message.name}.{entry.name}"
        repeated = bool(is_map) or label == "repeated"
        field = message.field.add(name=name, number=int(number), label=3 if repeated else 1)
        if kind[0].islower():
            field.type = field.Type.Value(f"TYPE_{kind.upper()}")
        else:
            field.type = field.TYPE_MESSAGE
            field.type_name = f".{PACKAGE}.{kind}"
        if label == "optional":  # presence is a oneof of one field
            field.proto3_optional, label = True, f"oneof _{name}"
        if label.startswith("oneof "):
            if label not in oneofs:
                oneofs.append(label)
                message.oneof_decl.add(name=label.removeprefix("oneof "))
            field.oneof_index = oneofs.index(label)


_file = descriptor_pb2.FileDescriptorProto(name=FILE, package=PACKAGE, syntax="proto3")
for _text in PROTO.split("message ")[1:]:
    _fill(_file.message_type.add(name=_text.split()[0]), _text)
POOL = descriptor_pool.DescriptorPool()
POOL.Add(_file)


def _class(name: str) -> Any:
    return message_factory.GetMessageClass(POOL.FindMessageTypeByName(f"{PACKAGE}.{name}"))


ForwardBackwardRequest = _class("ForwardBackwardRequest")
ForwardBackwardOutput = _class("ForwardBackwardOutput")
SampleResponse = _class("SampleResponse")
FLOAT32, INT64, INT32, BFLOAT16 = 1, 2, 3, 4  # of a tensor's ``dtype``
STOP, LENGTH = 0, 1  # of ``stop_reason``
