"""Custom losses: graphs that the SDK traces, against torch's autograd of the same, float64."""

import copy
import types

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tinker.lib.public_interfaces.custom_loss import encode_graph, run_loss_handle, trace_loss

from mint_jax.errors import UserError
from mint_jax.service import custom_loss
from mint_jax.service.custom_loss import OPERATIONS, CreateCustomLoss


def clipped(logprobs, old, advantages, mask, beta):
    ratio = torch.exp(logprobs - old)
    gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    kl = torch.expm1(old - logprobs) - (old - logprobs)
    count = mask.sum().clip(min=1.0)
    loss = -((gain - beta * kl) * mask).sum() / count
    binds = torch.where((ratio < 0.8) | (ratio > 1.2), mask, torch.zeros_like(mask))
    return loss, {"custom/binds:mean": binds.float().mean(), "custom/tokens:sum": mask.sum()}


def shapes(logprobs, mask):
    n = logprobs.shape[0] // 2
    pairs = torch.stack([logprobs, logprobs.detach()]).transpose(0, 1).reshape(-1, 2)
    whole = torch.cat([pairs.flatten(), logprobs[1:], logprobs[:n]])[..., None].squeeze(-1)
    best = logprobs.max(dim=0).values * torch.max(logprobs) + torch.min(logprobs, dim=0)[0]
    tail = whole.view(-1, 1).flip([0]).cumsum(0) * torch.full_like(mask, 0.5).size(0)
    spread = logprobs.std() + logprobs.var(0, False) + torch.min(logprobs)
    soft = logprobs.softmax(0) * F.log_softmax(logprobs, dim=-1) + logprobs.clone()
    dots = torch.dot(logprobs, mask) + torch.matmul(mask, logprobs) + torch.outer(mask, mask).mean()
    total = best + tail.mean() + spread + soft.sum() + dots + torch.logsumexp(logprobs, dim=0)
    return total / logprobs.numel() + logprobs.unsqueeze(0).prod(), {}


def elementwise(logprobs, mask):
    p = torch.sigmoid(logprobs) + F.softplus(logprobs) + F.logsigmoid(logprobs) + logprobs.tanh()
    p = p + torch.sqrt(-logprobs) + torch.rsqrt(-logprobs) + torch.log1p(-logprobs).square()
    p = p + (-logprobs).log() * logprobs.reciprocal() + logprobs.abs() ** 3 + logprobs.sign()
    p = p + logprobs.floor() + logprobs.ceil() * 2 + logprobs.round() + torch.div(1, 1 - logprobs)
    p = p + F.relu(logprobs + 2) + torch.maximum(logprobs, mask - 1) + logprobs % 3
    odd = torch.logical_or(logprobs.isnan(), ~torch.isfinite(logprobs)) ^ (mask >= 1)
    odd = torch.logical_and(torch.logical_not(odd), mask <= 1) & (mask == mask) & (mask != 7)
    p = p.masked_fill(odd, 0.5).nan_to_num() * torch.ones_like(p).to(torch.float32)
    some = (p > -9).any().float() + (p > -9).all().float() + p.amax() - p.amin(0)
    return p.sum() + some, {"custom/some:sum": some}


def soft(logprobs, teacher):
    return -(teacher.exp() * logprobs).sum(dim=-1, keepdim=True).mean(), {}


ranks = {"logprobs": 1, "old": 1, "advantages": 1, "mask": 1, "beta": 0}
LOSSES = {  # -> ranks of the inputs
    clipped: ranks,
    shapes: {"logprobs": 1, "mask": 1},
    elementwise: {"logprobs": 1, "mask": 1},
    soft: {"logprobs": 2, "teacher": 2},
}


def body_of(handle):
    """Returns the body that the SDK sends for a traced loss."""
    graph = encode_graph(handle).model_dump()
    inputs = [one.model_dump() for one in handle.inputs]
    place = {"session_id": "s", "custom_loss_seq_id": 0}
    return place | {"name": handle.name, "inputs": inputs, "graph": graph}


def create(body):
    return custom_loss.create(CreateCustomLoss.model_validate(body))


class Double(np.ndarray):
    """An input for the SDK's own evaluation, float64."""

    def to_torch(self):
        return torch.tensor(np.float64(self))


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_value_metrics_and_gradient_are_torch_s(loss, rng):
    handle, rows, logprobs = trace_loss(loss, LOSSES[loss], "s"), [], []
    for n in (4, 7) if loss is clipped else (5,):
        sizes = {name: (n, 3)[:rank] for name, rank in LOSSES[loss].items()}
        drawn = {name: -rng.uniform(0.2, 3, size) for name, size in sizes.items()}
        drawn |= {name: np.float64(rng.random(n) < 0.6) for name in drawn if name == "mask"}
        drawn = {name: np.array(x, np.float32) for name, x in drawn.items()}
        logprobs.append(drawn.pop("logprobs"))
        rows.append(drawn)
    given = [torch.tensor(np.float64(one), requires_grad=True) for one in logprobs]
    data = [
        types.SimpleNamespace(loss_fn_inputs={name: x.view(Double) for name, x in row.items()})
        for row in rows
    ]
    value, metrics = run_loss_handle(handle, data, given)
    value.backward()
    total, found, weights = custom_loss.differentiate(create(body_of(handle)), logprobs, rows)
    # float32 against float64: sums of up to 20 terms, some of them cubes of 3
    assert total == pytest.approx(float(value.detach()), rel=1e-5, abs=1e-5)
    assert found == pytest.approx(metrics, rel=1e-5)
    for got, one in zip(weights, given, strict=True):
        np.testing.assert_allclose(-got, one.grad.numpy(), rtol=1e-4, atol=1e-5)


def test_the_losses_above_call_every_operation():
    graphs = [encode_graph(trace_loss(loss, own, "s")) for loss, own in LOSSES.items()]
    called = {node.target.rpartition(".")[2] for graph in graphs for node in graph.nodes}
    assert set(OPERATIONS) - called == set()


def node(i, **fields):
    return lambda body: body["graph"]["nodes"][i].update(fields)


def output(value):
    return lambda body: body["graph"]["nodes"][-1].update(args=[{"tuple": value}])


REF, X = {"ref": "mul"}, {"ref": "logprobs"}
BAD = [  # change of a good body, words of the refusal
    (node(2, op="call_module"), "op"),
    (node(2, op="get_attr"), "op"),
    (node(2, target="os.system"), "'os.system' is not supported"),
    (node(2, target="torch.load"), "'torch.load' is not supported; there are: abs"),
    (node(2, op="call_method", target="where"), "'where' is not supported"),
    (node(2, args=[{"ref": "sum_1"}, X]), "argument .* is not supported"),
    (node(2, args=[{"code": "1"}, X]), "argument .* is not supported"),
    (node(2, args=["a" * 9, 10**9]), "has other arguments than tensors and numbers"),
    (node(2, args=[10**9, 10**9]), "makes 1e\\+18; expected a float there"),
    (node(2, args=[X]), "node 'mul': TypeError"),
    (
        node(2, target="torch.full_like", args=[X, 1, None, {"tuple": [10**9]}]),
        "000016 numbers up to",
    ),
    (node(2, kwargs={"out": X}), "node 'mul': TypeError"),
    (node(2, target="getattr", args=[X, "__class__"]), "attribute is '__class__'; choose"),
    (node(1, target="other"), "KeyError: 'other'"),
    (node(3, target="sum", args=[REF], kwargs={"dim": 5}), "axis 5 is out of bounds"),
    (output([REF, {"dict": {}}]), "the loss is float32 of shape \\(8,\\); expected a scalar"),
    (output([1.0, {"dict": {}}]), "the loss is 1.0; expected a scalar"),
    (output([{"ref": "sum_1"}, {"dict": {"loss:sum": {"ref": "sum_1"}}}]), "metric 'loss:sum'"),
    (output([{"ref": "sum_1"}]), "node 'output': ValueError"),
    (lambda body: body["graph"]["nodes"].pop(), "has no output"),
    (lambda body: body["graph"].update(format=2), "format"),
    (lambda body: body["graph"].update(nodes=body["graph"]["nodes"] * 300), "nodes"),
    (lambda body: body["inputs"].reverse(), "expected logprobs of rank 1 or 2"),
    (lambda body: body["inputs"][0].update(rank=3), "rank"),
]


@pytest.mark.parametrize(("change", "match"), BAD, ids=[match[:40] for _, match in BAD])
def test_a_malformed_graph_is_refused_by_what_is_wrong(change, match):
    def weighted(logprobs, weights):
        return (logprobs * weights).sum(), {}

    good = body_of(trace_loss(weighted, {"logprobs": 1, "weights": 1}, "s"))
    custom_loss.of_id(create(good))
    bad = copy.deepcopy(good)
    change(bad)
    with pytest.raises(ValueError, match=match) as error:
        create(bad)
    assert len(str(error.value)) < 2000


@pytest.mark.parametrize("id", ["", "no id", "eJwDAAAAAAE=", "H4sIAAAAAAACA6uuBQBDv6ajAgAAAA=="])
def test_an_id_of_no_loss_is_refused(id):
    with pytest.raises(UserError):
        custom_loss.of_id(id)
