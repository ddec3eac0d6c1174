"""The Tinker wire format against the SDK's own encoders and decoders: what it writes we read, what
we write it reads.
"""

import contextlib
import json
import math

import numpy as np
import pytest
import torch
from google.protobuf import descriptor_pb2
from tinker import types
from tinker.proto import tinker_public_pb2 as pb
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import (
    deserialize_forward_backward_output,
    deserialize_sample_response,
)
from tinker.types._pydantic_types.forward_backward_input import ForwardBackwardInput as JsonInput

from mint_jax.errors import UserError
from mint_jax.rollout.request import Completion
from mint_jax.service.wire import forward_backward, messages, samples, tensors
from mint_jax.train.losses import KINDS
from tests.memory import assert_takes_at_most

PROTO, JSON = "application/x-protobuf", "application/json"
V = 50  # ids


def test_our_messages_are_the_sdks_field_for_field():
    theirs, ours = descriptor_pb2.FileDescriptorProto(), descriptor_pb2.FileDescriptorProto()
    pb.DESCRIPTOR.CopyToProto(theirs)
    messages.POOL.FindFileByName("mint_jax/tinker_public.proto").CopyToProto(ours)
    for message in theirs.message_type:
        for field in message.field:
            field.ClearField("json_name")
            if field.type == field.TYPE_ENUM:  # int32 here
                field.ClearField("type_name")
                field.type = field.TYPE_INT32
    named = {message.name: message for message in theirs.message_type}
    for message in ours.message_type:
        if message.name != "Chunk":  # images are bytes here
            assert message == named[message.name]
    values = [(pb.DTYPE_FLOAT32, pb.DTYPE_INT64, pb.DTYPE_INT32, pb.DTYPE_BFLOAT16)]
    assert values == [tuple(tensors.FORMS)]
    assert (messages.STOP, messages.LENGTH) == (pb.STOP_REASON_STOP, pb.STOP_REASON_LENGTH)


# -- forward and backward, read


def sampled_inputs(rng, n, loss):
    """Random inputs of a loss of the contract, as numpy arrays."""
    inputs = {"target_tokens": rng.integers(0, V, n)}
    if loss == "cross_entropy":
        return inputs | {"weights": rng.normal(size=n).astype(np.float32)}
    mask = rng.random(n) < 0.6
    given = mask
    if loss == "gspo":  # whose mask says nothing of the advantages
        given = rng.random(n) < 0.6
        mask[:2], given[:2] = [False, True][:n], True
    inputs |= {
        "logprobs": -4 * rng.random(n).astype(np.float32),
        "advantages": (rng.normal(size=n) * given).astype(np.float32),
    }
    return inputs | ({"sequence_ratio_mask": mask.astype(np.float32)} if loss == "gspo" else {})


def sampled_here(datum):
    """A datum whose targets were all sampled."""
    spans = [types.SampledProvenanceSpan(sequence_id="a", length=datum.model_input.length)]
    return datum.with_provenance(model_input=spans, loss_fn_inputs=spans)


def sdk_datum(tokens, inputs, cuts=()):
    chunks = [types.EncodedTextChunk(tokens=part.tolist()) for part in np.split(tokens, list(cuts))]
    return types.Datum(model_input=types.ModelInput(chunks=chunks), loss_fn_inputs=inputs)


def sdk_request(data, loss, config=None):
    request = types.ForwardBackwardInput(data=data, loss_fn=loss, loss_fn_config=config)
    return types.ForwardBackwardRequest(
        forward_backward_input=request, model_id="s:train:0", seq_id=3
    )


def proto_body(request):
    return forward_backward_request_to_proto(request).SerializeToString()


def batch_of(request):
    """The content of a request of the SDK, or of its message."""
    whole = hasattr(request, "SerializeToString")
    body = request.SerializeToString() if whole else proto_body(request)
    return forward_backward.read(body, PROTO).batch()[0]


def json_of(tensor):
    out = {"data": tensor.data, "dtype": tensor.dtype, "shape": tensor.shape}
    for name in ("sparse_crow_indices", "sparse_col_indices"):
        if getattr(tensor, name) is not None:
            out[name] = getattr(tensor, name)
    return out


def json_body(request):
    """As SDKs before protobuf send it."""
    batch = request.forward_backward_input
    data = []
    for datum in batch.data:
        inputs = {name: json_of(tensor) for name, tensor in datum.loss_fn_inputs.items()}
        data.append({"model_input": datum.model_input.model_dump(), "loss_fn_inputs": inputs})
    whole = {"data": data, "loss_fn": batch.loss_fn, "loss_fn_config": batch.loss_fn_config}
    body = {"model_id": request.model_id, "seq_id": request.seq_id}
    body["forward_backward_input"] = JsonInput.model_validate(whole).model_dump()
    return json.dumps(body).encode()


def read(request, content_type):
    body = proto_body(request) if content_type == PROTO else json_body(request)
    return forward_backward.read(body, content_type)


CONFIGS = {
    "ppo": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1},
    "cispo": {"clip_high_threshold": 5.0},
    "dro": {"beta": 0.05},
}


@pytest.mark.parametrize("loss", forward_backward.LOSSES)
@pytest.mark.parametrize("content_type", [PROTO, JSON])
def test_what_the_sdk_encodes_is_read_back_the_same(loss, content_type, rng):
    lengths = [1, 7, 12]
    tokens = [rng.integers(0, V, n) for n in lengths]
    inputs = [sampled_inputs(rng, n, loss) for n in lengths]
    data = [sdk_datum(t, i, cuts=(t.size // 2,)) for t, i in zip(tokens, inputs)]
    if loss == "stable_reinforce":
        data = [sampled_here(datum) for datum in data]
    message = read(sdk_request(data, loss, CONFIGS.get(loss)), content_type)
    assert (message.model_id, message.seq_id) == ("s:train:0", 3)
    if (loss, content_type) == ("stable_reinforce", JSON):
        refused(message.batch, "has no loss_fn_input_spans; stable_reinforce needs them")
        return
    call, _ = message.batch()
    kind = "cispo" if loss == "stable_reinforce" else loss
    assert (call.backward, call.columns, KINDS[call.loss.kind]) == (True, None, kind)
    for datum, t, sent in zip(call.data, tokens, inputs):
        dtypes = datum.tokens.dtype, datum.targets.dtype, datum.weights.dtype
        assert dtypes == (np.int32, np.int32, np.float32)
        np.testing.assert_array_equal(datum.tokens, t)
        np.testing.assert_array_equal(datum.targets, sent["target_tokens"])
        mask, given = sent.get("sequence_ratio_mask"), sent.get("advantages")
        assert (datum.in_ratio is None) == (mask is None)
        if mask is not None:
            np.testing.assert_array_equal(datum.in_ratio, mask)
        counts = np.ones(t.size) if mask is None else (mask != 0) | (given != 0)
        np.testing.assert_array_equal(datum.weights, sent.get("weights", counts))
        for name, array in (("advantages", datum.advantages), ("logprobs", datum.old_logp)):
            assert (array is None) == (loss == "cross_entropy")
            if array is not None:
                np.testing.assert_array_equal(array, sent[name])


def test_weights_of_a_sampled_loss_count_and_what_it_does_not_need_is_not_read(rng):
    inputs = sampled_inputs(rng, 5, "ppo") | {
        "weights": np.float32([0, 1, 2, 0, 1]),
        "sequence_ratio_mask": np.full(5, np.nan, np.float32),
    }
    (datum,) = batch_of(sdk_request([sdk_datum(np.arange(5), inputs)], "ppo")).data
    np.testing.assert_array_equal(datum.weights, [0, 1, 2, 0, 1])


def test_numbers_of_other_types_are_taken_where_they_lose_nothing(rng):
    """Weights as whole numbers, which torch users send; int32; bfloat16 without a shape."""
    data = [sdk_datum(np.arange(4), sampled_inputs(rng, 4, "cross_entropy"))]
    message = forward_backward_request_to_proto(sdk_request(data, "cross_entropy"))
    targets, weights = (
        message.data[0].loss_fn_inputs[name] for name in ("target_tokens", "weights")
    )
    weights.dtype, weights.dense = pb.DTYPE_INT64, np.array([0, 1, 1, -2]).tobytes()
    targets.dtype, targets.dense = pb.DTYPE_INT32, np.int32([5, 6, 7, 8]).tobytes()
    (datum,) = batch_of(message).data
    np.testing.assert_array_equal(datum.weights, [0, 1, 1, -2])
    np.testing.assert_array_equal(datum.targets, [5, 6, 7, 8])
    halves = torch.tensor([1.5, -0.25, 3.0, 0.0], dtype=torch.bfloat16)
    weights.dtype, weights.dense = pb.DTYPE_BFLOAT16, halves.view(torch.int16).numpy().tobytes()
    del weights.shape[:]
    (datum,) = batch_of(message).data
    np.testing.assert_array_equal(datum.weights, halves.float().numpy())


def soft_inputs(rng, n, k, listed):
    """Targets and weights ``[n, k]`` with some cells that are not 0, among them token 0 with a
    weight.
    """
    inside = rng.random((n, k)) < listed
    weights = (rng.normal(size=(n, k)) * inside).astype(np.float32)
    targets = torch.tensor(rng.integers(0, 4, (n, k)) * inside)
    return {"target_tokens": targets, "weights": torch.tensor(weights)}


@pytest.mark.parametrize("content_type", [PROTO, JSON])
@pytest.mark.parametrize(("k", "listed"), [(1, 0.5), (3, 1.0), (30, 0.1), (30, 0.0)])
def test_soft_targets_come_back_in_the_shape_they_were_sent_in(content_type, k, listed, rng):
    """Log-probabilities looked up in a table, of what is computed, are those of what was sent, in
    every cell.
    """
    lengths, protobuf = [9, 4], content_type == PROTO
    data = [sdk_datum(rng.integers(0, V, n), soft_inputs(rng, n, k, listed)) for n in lengths]
    call, _ = read(sdk_request(data, "cross_entropy"), content_type).batch()
    tables = [-rng.random((n, 4)).astype(np.float32) for n in lengths]
    logprobs = [np.take_along_axis(t, d.targets.astype(int), 1) for t, d in zip(tables, call.data)]
    outputs = decoded(encoded(call, logprobs, protobuf), protobuf)
    for sent, datum, table, output in zip(data, call.data, tables, outputs):
        targets, weights = (
            sent.loss_fn_inputs[name].to_numpy() for name in ("target_tokens", "weights")
        )
        used = ((targets != 0) | (weights != 0)).sum(1).max()
        assert datum.targets.shape[1] == min(k, used + 1)
        assert math.isclose(datum.weights.sum(), weights.sum(), abs_tol=1e-5)
        expected = np.take_along_axis(table, targets, 1)
        np.testing.assert_array_equal(output["logprobs"], expected)
        np.testing.assert_array_equal(output["elementwise_loss"], -weights * expected)


def test_options_have_the_defaults_of_the_contract():
    clips = {"ppo": (0.8, 1.2), "cispo": (0.0, 4.0), "gspo": (0.8, 1.2)}
    clips["stable_reinforce"] = (0.0, 1.0)
    for loss in forward_backward.LOSSES:
        given = {"beta": 0.1} if loss == "dro" else {}
        assert forward_backward.loss_of(loss, given)[1:3] == clips.get(loss, (0.0, math.inf))


# -- forward and backward, written


def encoded(call, logprobs, protobuf):
    """The answer to a call that gave these log-probabilities, and a loss of 2.5."""
    return forward_backward.encode(call.result(logprobs, 2.5), protobuf)


def decoded(body, protobuf):
    """Outputs as arrays: by the SDK's decoder, or from JSON by the SDK's tensors."""
    if protobuf:
        answer = deserialize_forward_backward_output(body)
        assert answer.metrics == {"loss:sum": 2.5}
        return [{name: t.to_numpy() for name, t in one.items()} for one in answer.loss_fn_outputs]
    answer = json.loads(body)
    assert answer["metrics"] == {"loss:sum": 2.5}
    return [
        {name: types.TensorData(**t).to_numpy() for name, t in one.items()}
        for one in answer["loss_fn_outputs"]
    ]


@pytest.mark.parametrize("protobuf", [True, False])
def test_outputs_of_ragged_shapes_are_decoded_in_order(protobuf, rng):
    """[N], [N, 2], [N, 3] and [N] behind each other: records of one shape each."""
    data, logprobs = [], []
    for shape in [(5,), (2,), (4, 2), (1, 2), (3, 3), (6,)]:
        weights = rng.normal(size=shape).astype(np.float32)
        inputs = {"target_tokens": rng.integers(1, V, shape), "weights": weights}
        data.append(sdk_datum(np.arange(shape[0]), inputs))
        logprobs.append(-rng.random(shape).astype(np.float32))
    batch = batch_of(sdk_request(data, "cross_entropy"))
    outputs = decoded(encoded(batch, logprobs, protobuf), protobuf)
    for one, logp, datum in zip(outputs, logprobs, batch.data, strict=True):
        np.testing.assert_array_equal(one["logprobs"], logp)
        np.testing.assert_array_equal(one["elementwise_loss"], -datum.weights * logp)


@pytest.mark.parametrize("protobuf", [True, False])
def test_infinity_and_nan_arrive_and_a_weight_of_nothing_is_no_loss(protobuf, rng):
    request = sdk_request([sdk_datum(np.arange(4), sampled_inputs(rng, 4, "ppo"))], "ppo")
    logp = np.float32([-1, -np.inf, np.nan, 0])
    (one,) = decoded(encoded(batch_of(request), [logp], protobuf), protobuf)
    assert set(one) == {"logprobs"}
    np.testing.assert_array_equal(one["logprobs"], logp)
    inputs = {"target_tokens": np.arange(2), "weights": np.float32([0, 1])}
    call = batch_of(sdk_request([sdk_datum(np.arange(2), inputs)], "cross_entropy"))
    (one,) = decoded(encoded(call, [np.float32([-np.inf, -2])], protobuf), protobuf)
    assert one["elementwise_loss"].tolist() == [0, 2]


# -- mistakes


def good(loss="cross_entropy", config=None):
    """Returns the SDK's message: a plain datum and, for cross-entropy, one of sparse targets."""
    ones = np.ones(3, np.float32)
    plain = {"target_tokens": np.arange(3)}
    if loss == "cross_entropy":
        soft = {"target_tokens": torch.eye(4, 9, dtype=torch.int64) * 3, "weights": torch.eye(4, 9)}
        data = [sdk_datum(np.arange(3), plain | {"weights": ones}), sdk_datum(np.arange(4), soft)]
    else:
        data = [sdk_datum(np.arange(3), plain | {"logprobs": -ones, "advantages": ones})]
    return forward_backward_request_to_proto(sdk_request(data, loss, config))


def inputs(name, datum=0, shape=None, **fields):
    """Returns a change of a tensor; an array stands for its bytes."""

    def change(message):
        tensor = message.data[datum].loss_fn_inputs[name]
        if shape is not None:
            tensor.shape[:] = shape
        for field, value in fields.items():
            part = tensor.sparse_csr if datum and field != "dtype" else tensor
            setattr(part, field, value.tobytes() if isinstance(value, np.ndarray) else value)

    return change


def span(sequence, offset, length, field="model_input_spans"):
    def change(message):
        run = getattr(message.data[0], field).add().prompt_tokens
        run.sequence_id, run.offset, run.length = sequence, offset, length

    return change


def of(*values):
    return np.array(values, np.int64)


def loss_named(name):
    return lambda message: setattr(message, "loss_fn", name)


F = np.float32
BAD = [  # message, change, words of the refusal
    (good(), inputs("weights", dense=F([1, 2, 3, 4])), "datum 0: weights has 4 values; its shape"),
    (good(), lambda m: m.data[0].loss_fn_inputs["weights"].ClearField("encoding"), "no values"),
    (good(), inputs("weights", dtype=0), "dtype is 0; choose"),
    (good(), inputs("target_tokens", dense=of(1, 2**40, 3)), "target_tokens has 1099511627776"),
    (good(), inputs("weights", dense=F([1, np.nan, 3])), "weights has nan at 1"),
    (good(), inputs("weights", shape=[2**61, 8]), "its shape .* has 18446744073709551616"),
    (good(), inputs("weights", shape=[3, 1]), r"weights has shape \[3, 1\]; expected \[3\]"),
    (good(), lambda m: m.data[0].model_input.add().image.SetInParent(), "is of type 'image'"),
    (good(), lambda m: m.data[0].loss_fn_inputs.pop("target_tokens"), "has no target_tokens"),
    (good(), lambda m: m.data[0].loss_fn_inputs["mask"].SetInParent(), "has 'mask'"),
    (good(), loss_named("l2"), "loss_fn is .*'l2'.*; choose one of: cross_entropy"),
    (good(), lambda m: m.loss_fn_config.update({"beta": 1.0}), "cross_entropy takes no options"),
    (good(), lambda m: m.data[0].model_input_spans.add(), r"model_input_spans\[0\] has no kind"),
    (good(), span("a", -1, 3), "offset -1, length 3"),
    (good(), span("a", 0, 2**62), "positions; the datum has 3"),
    (good(), inputs("target_tokens", 1, shape=[4, 2**40]), "is sparse, of shape .* fewer columns"),
    (good(), inputs("target_tokens", 1, crow_indices=of(0, 1, 2, 4)), "and 4 crow_indices"),
    (good(), inputs("target_tokens", 1, crow_indices=of(0, 2**63 - 1, -2, 1, 4)), "that ascend"),
    (good(), inputs("target_tokens", 1, col_indices=of(0, 1, 2, 9)), "within columns 0 to 8"),
    (
        good(),
        inputs("target_tokens", 1, crow_indices=of(0, 2, 2, 3, 4), col_indices=of(1, 1, 2, 3)),
        "col_indices do not ascend",
    ),
    (good("ppo"), loss_named("gspo"), "has no sequence_ratio_mask; gspo needs"),
    (good("ppo"), inputs("logprobs", dense=F([0, -np.inf, 0])), "logprobs has -inf at 1"),
    (good("ppo"), lambda m: m.loss_fn_config.update({"clip": 0.2}), "has 'clip'; ppo takes clip"),
    (good("ppo", {"clip_low_threshold": 1.3}), lambda m: None, "1.3 and clip_high_threshold 1.2"),
    (good("ppo", {"clip_high_threshold": math.nan}), lambda m: None, "is nan; expected"),
    (good("dro"), lambda m: None, "has no beta; dro needs it"),
    (good("stable_reinforce"), lambda m: None, "has no loss_fn_input_spans"),
    (good("stable_reinforce"), span("a", 0, 3, "loss_fn_input_spans"), "an advantage at 0, which"),
    (good("stable_reinforce", {"kl_coeff": -1.0}), lambda m: None, "kl_coeff is -1.0; expected"),
]


def refused(call, match, most=64 << 20):
    """Checks for a short UserError that takes little memory, in bytes."""

    def one():
        with pytest.raises(UserError, match=match) as error:
            call()
        assert len(str(error.value)) < 1000

    assert_takes_at_most(most, one)


@pytest.mark.parametrize(("message", "change", "match"), BAD, ids=[match[:60] for *_, match in BAD])
def test_a_bad_request_has_its_place_and_is_refused_there(message, change, match):
    changed = type(message)()
    changed.CopyFrom(message)
    change(changed)
    read = forward_backward.read(changed.SerializeToString(), PROTO)
    assert (read.model_id, read.seq_id) == ("s:train:0", 3)
    refused(read.batch, match)


def test_sparse_cells_of_a_whole_request_are_bounded():
    message = good()
    for name in ("target_tokens", "weights"):
        inputs(name, 1, shape=[4, tensors.MAX_CELLS // 4])(message)
    batch_of(message)
    message.data.append(message.data[1])
    # the first two data have been read: MAX_CELLS tokens of 8 bytes and weights of 4
    most = (64 << 20) + 12 * tensors.MAX_CELLS
    refused(lambda: batch_of(message), "data 0 to 2 have 8388608 cells", most)


@pytest.mark.parametrize(
    ("body", "content_type", "match"),
    [
        (b"", PROTO, "model_id is ''"),
        (good().SerializeToString()[:-1], PROTO, "no ForwardBackwardRequest"),
        (b"{}", "text/plain", "content type is 'text/plain'"),
        (b"[" * 10**6, JSON, "nests deeper"),
        (b'{"model_id": "m", "seq_id": 4294967296}', JSON, "seq_id is 4294967296"),
    ],
)
def test_a_body_without_a_place_is_refused(body, content_type, match):
    refused(lambda: forward_backward.read(body, content_type), match)


def test_damaged_bytes_are_read_or_refused_and_nothing_else(rng):
    body = good().SerializeToString()
    for change in range(400):
        damaged = bytearray(body[: rng.integers(len(body))] if change % 4 == 0 else body)
        for _ in range(rng.integers(1, 4)):
            if damaged:
                damaged[rng.integers(len(damaged))] = rng.integers(256)
        with contextlib.suppress(UserError):
            forward_backward.read(bytes(damaged), PROTO).batch()


# -- sampling


def sample_body(prompt=(1, 2, 3), session="s", **more):
    """As the SDK sends it."""
    params = types.SamplingParams(**more.pop("params", {}))
    given = {"sampling_session_id": session, "seq_id": 0} if session else {}
    request = types.SampleRequest(
        prompt=types.ModelInput.from_ints(list(prompt)), sampling_params=params, **given, **more
    )
    return request.model_dump_json(exclude_unset=True).encode()


def spec_of(body, context=100, end_ids=(7, 8), seed=11):
    return samples.spec_of(body, context, end_ids, seed)


def test_a_sample_with_every_setting():
    body = sample_body(
        num_samples=3,
        params={"max_tokens": 5, "seed": 2**32 + 9, "top_k": 4, "top_p": 0.5, "stop": ["a", "b"]},
        prompt_logprobs=True,
        topk_prompt_logprobs=2,
        topk_sample_logprobs=3,
        target_prompt_logprobs={"data": [4, -1, 5, 6], "dtype": "int64", "shape": [2, 2]},
        prompt_logprobs_last_n=2,
    )
    got = spec_of(body).request
    assert (got.prompt, got.n, got.max_tokens, got.seed) == ((1, 2, 3), 3, 5, 9)
    assert (got.top_k, got.top_p, got.stop, got.stop_ids) == (4, 0.5, ("a", "b"), ())
    assert (got.prompt_logprobs, got.top_prompt_logprobs, got.top_logprobs) == (True, 2, 3)
    assert (got.target_prompt_logprobs, got.prompt_logprobs_last_n) == (((4,), (5, 6)), 2)
    plain = spec_of(sample_body()).request
    assert (plain.n, plain.max_tokens, plain.seed, plain.stop_ids) == (1, 97, 11, (7, 8))


@pytest.mark.parametrize("last", [None, 2])
@pytest.mark.parametrize("sparse", [True, False])
def test_everything_about_a_prompt_is_decoded_by_the_sdk(last, sparse, rng):
    def numbers(n):
        return (-rng.random(n)).astype(np.float32).tolist()

    def pairs(n, k):
        return [list(zip(rng.integers(1, V, k).tolist(), numbers(k))) for _ in range(n)]

    prompt = rng.integers(0, V, 6).tolist()
    ids = np.full((5, 12), -1)
    ids[np.arange(5), rng.integers(0, 11, 5)] = rng.integers(0, V, 5)
    ids[3, 11] = 0
    make = types.TensorData.from_torch_sparse if sparse else types.TensorData.from_torch
    sent = json_of(make(torch.tensor(ids), **({"pad_value": -1} if sparse else {})))
    assert ("sparse_crow_indices" in sent) == sparse
    more = {"topk_prompt_logprobs": 3, "topk_sample_logprobs": 2, "prompt_alt_tokens_k": 4}
    more |= {"target_prompt_logprobs": sent, "prompt_logprobs_last_n": last, "num_samples": 2}
    spec = spec_of(sample_body(prompt, prompt_logprobs=True, **more))
    wanted = spec.request.target_prompt_logprobs
    assert [len(row) for row in wanted] == [1, 1, 1, 2, 1]
    first = 0 if last is None else 3  # the first position that is scored
    shared = {
        "reused": 2,
        "prompt_logprobs": [math.nan] * first + numbers(5 - first),
        "top_prompt_logprobs": [[]] * first + pairs(5 - first, 3),
        "prompt_alternatives": [[]] * first + pairs(5 - first, 4),
        "target_prompt_logprobs": [[]] * first + [numbers(len(row)) for row in wanted[first:]],
    }
    completions = [
        Completion(
            [5] * T, numbers(T), numbers(T), "stop", None, top_logprobs=pairs(T, 2), **shared
        )
        for T in (1, 2)
    ]
    answer = deserialize_sample_response(samples.encode(completions, spec, True))
    raw = json.loads(samples.encode(completions, spec, False))
    scored = [None, *(None if math.isnan(p) else p for p in shared["prompt_logprobs"])]
    assert answer.prompt_logprobs == raw["prompt_logprobs"] == scored
    top = [None, *(place or None for place in shared["top_prompt_logprobs"])]
    assert answer.topk_prompt_logprobs == top
    assert raw["topk_prompt_logprobs"] == json.loads(json.dumps(top))
    likeliest = [one.top_logprobs for one in completions]
    assert [one.topk_logprobs for one in answer.sequences] == likeliest
    # the scored cells in the layout of the request: 0 for -1, NaN if not scored
    expected = np.zeros((5, 12), np.float32)
    for row, found, named in zip(expected, shared["target_prompt_logprobs"], ids):
        row[named != -1] = found or np.nan
    targets = types.TensorData(**raw["target_prompt_logprobs"])
    for tensor in (answer.target_prompt_logprobs, targets):
        assert tensor.sparse_crow_indices == sent.get("sparse_crow_indices")
        assert tensor.sparse_col_indices == sent.get("sparse_col_indices")
        np.testing.assert_array_equal(tensor.to_numpy(), expected)
    in_json = {name: types.TensorData(**t) for name, t in raw["prompt_alt_tokens"].items()}
    for drawn in (vars(answer.prompt_alt_tokens), in_json):
        rows = zip(drawn["tokens"].tolist(), drawn["logprobs"].tolist())
        found = [list(zip(*row)) for row in rows]
        assert found == [place or [(0, -99999.0)] * 4 for place in shared["prompt_alternatives"]]
