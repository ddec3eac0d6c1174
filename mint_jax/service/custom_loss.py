"""Custom losses that clients trace with torch.fx and upload: graphs of torch's operations, computed
in JAX for each datum, in float32. A loss's id is the loss itself, compressed: the server stores
nothing, and a request has all that it needs. Graphs call only ``OPERATIONS``.

Axes: T positions of a datum, K targets of a position.
"""

import base64
import collections
import functools
import gzip
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from pydantic import Field

from mint_jax.errors import UserError, choice
from mint_jax.service.bodies import decompress
from mint_jax.service.tinker_types import Name, SessionRef
from mint_jax.service.validation import Body, Place, parse, shown

MAX_NODES, MAX_INPUTS, MAX_BYTES = 1000, 16, 1 << 20
MAX_CELLS = 1 << 25  # of all values of a datum: a gradient keeps them
METRIC = re.compile(r"custom/[a-z0-9_./-]{1,64}:(sum|mean)")
MODULES = ("", "torch", "torch._C._nn", "torch.nn.functional", "operator")
PROGRAMS = 512  # compiled ones that are kept: one of each loss and length
Value = Any  # an array, a number, or a tuple or list of these


class Input(Body):
    name: Annotated[str, Field(pattern=r"^[a-z_][a-z0-9_]{0,63}$")]
    rank: Literal[0, 1, 2]


class Node(Body):
    op: Literal["placeholder", "call_function", "call_method", "output"]
    name: Name
    target: Name
    args: list[Any] = []
    kwargs: dict[str, Any] = {}


class Graph(Body):
    format: Literal[1] = 1
    nodes: Annotated[list[Node], Field(min_length=1, max_length=MAX_NODES)]


class Loss(Body):
    name: Name
    inputs: Annotated[list[Input], Field(min_length=1, max_length=MAX_INPUTS)]
    graph: Graph


class CreateCustomLoss(Loss, SessionRef):
    custom_loss_seq_id: Place


# -- operations, with torch's names and arguments


def _axes(dim: Any) -> Any:
    if isinstance(dim, bool):
        raise TypeError("dim is a bool; expected a number")
    return tuple(dim) if isinstance(dim, list) else dim


def _reduction(function: Any) -> Callable[..., Value]:
    return lambda x, dim=None, keepdim=False: function(x, axis=_axes(dim), keepdims=keepdim)


Extreme = collections.namedtuple("Extreme", "values indices")


def _extreme(function: Any, where: Any, pairwise: Any) -> Callable[..., Value]:
    def extreme(x: Value, dim: Any = None, keepdim: bool = False) -> Value:
        if dim is None or isinstance(dim, jax.Array):
            return function(x) if dim is None else pairwise(x, dim)
        return Extreme(*(one(x, axis=_axes(dim), keepdims=keepdim) for one in (function, where)))

    return extreme


def _spread(function: Any) -> Callable[..., Value]:
    return lambda x, dim=None, unbiased=True, keepdim=False: function(
        x, axis=_axes(dim), ddof=int(unbiased), keepdims=keepdim
    )


def _clamp(x: Value, min: Value = None, max: Value = None) -> Value:
    # jnp.clip halves the gradient at a bound, torch does not
    x = x if min is None else jnp.where(x < min, min, x)
    return x if max is None else jnp.where(x > max, max, x)


def _reshape(x: Value, *sizes: Any) -> Value:
    return jnp.reshape(x, sizes[0] if isinstance(sizes[0], tuple | list) else sizes)


def _attribute(x: Value, name: str) -> Value:
    if name in ("shape", "ndim", "dtype") or (isinstance(x, Extreme) and name in x._fields):
        return getattr(x, name)
    raise choice("attribute", name, ("shape", "ndim", "dtype", *Extreme._fields))


def _cast(x: Value, dtype: Any = None) -> Value:
    return x if dtype is None else jnp.asarray(x, getattr(dtype, "dtype", dtype))


SAME = "exp log log1p expm1 sqrt square abs sign floor ceil round tanh isfinite isnan nan_to_num"
SAME += " reciprocal minimum maximum logical_and logical_or logical_not matmul dot outer"
SAME += " zeros_like ones_like full_like"
OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "neg", "gt", "lt", "ge", "le")
OPERATORS += ("eq", "ne", "and_", "or_", "xor", "invert")
REDUCTIONS = ("sum", "mean", "prod", "any", "all", "amax", "amin")
OPERATIONS: dict[str, Callable[..., Value]] = {
    **{name: getattr(jnp, name) for name in SAME.split(" ")},
    **{name: getattr(operator, name) for name in (*OPERATORS, "getitem")},
    **{name: _reduction(getattr(jnp, name)) for name in REDUCTIONS},
    "div": operator.truediv,
    "pow": lambda x, y: jnp.power(jnp.float32(x), y),
    "rsqrt": jax.lax.rsqrt,
    "sigmoid": jax.nn.sigmoid,
    "log_sigmoid": jax.nn.log_sigmoid,
    "relu": jax.nn.relu,
    "softplus": lambda x, beta=1, threshold=20: jax.nn.softplus(beta * x) / beta,
    "detach": jax.lax.stop_gradient,
    "clone": lambda x: x,
    "clamp": _clamp,
    "clip": _clamp,
    "where": lambda condition, input, other: jnp.where(condition, input, other),
    "masked_fill": lambda x, mask, value: jnp.where(mask, value, x),
    "max": _extreme(jnp.max, jnp.argmax, jnp.maximum),
    "min": _extreme(jnp.min, jnp.argmin, jnp.minimum),
    "std": _spread(jnp.std),
    "var": _spread(jnp.var),
    "cumsum": lambda x, dim: jnp.cumsum(x, axis=dim),
    "flip": lambda x, dims: jnp.flip(x, axis=_axes(dims)),
    "logsumexp": _reduction(jax.nn.logsumexp),
    "softmax": lambda x, dim: jax.nn.softmax(x, axis=dim),
    "log_softmax": lambda x, dim: jax.nn.log_softmax(x, axis=dim),
    "reshape": _reshape,
    "view": _reshape,
    "flatten": jnp.ravel,
    "squeeze": lambda x, dim=None: jnp.squeeze(x, axis=_axes(dim)),
    "unsqueeze": lambda x, dim: jnp.expand_dims(x, dim),
    "transpose": lambda x, dim0, dim1: jnp.swapaxes(x, dim0, dim1),
    "cat": lambda tensors, dim=0: jnp.concatenate(tensors, axis=dim),
    "stack": lambda tensors, dim=0: jnp.stack(tensors, axis=dim),
    "to": _cast,
    "float": lambda x: _cast(x, jnp.float32),
    "getattr": _attribute,
    "size": lambda x, dim=None: x.shape if dim is None else x.shape[dim],
    "numel": lambda x: x.size,
}
FUNCTIONS = ("where", "cat", "stack", "getattr", "getitem")  # a method has other arguments, or none
DTYPES = {"float32": jnp.float32, "int64": jnp.int32, "int32": jnp.int32, "bool": jnp.bool_}
IGNORED = ("inplace", "_stacklevel")  # arguments that change no value


# -- graphs


def _decoded(sent: Any, values: Mapping[str, Value]) -> Value:
    """Returns an argument of a node; ``values`` are those of the nodes before."""
    if isinstance(sent, list):
        return [_decoded(one, values) for one in sent]
    if not isinstance(sent, dict):
        return sent
    pair: Any = next(iter(sent.items())) if len(sent) == 1 else ("", None)
    kind, value = pair
    match kind:
        case "ref" if value in values:
            return values[value]
        case "tuple":
            return tuple(_decoded(one, values) for one in value)
        case "dict":
            return {key: _decoded(one, values) for key, one in value.items()}
        case "slice":
            return slice(*(_decoded(one, values) for one in value))
        case "ellipsis":
            return Ellipsis
        case "float" if value in ("inf", "-inf", "nan"):
            return float(value)
        case "dtype" if value in DTYPES:
            return DTYPES[value]
    raise UserError(f"argument {sent!s:.80} is not supported; expected a value of a node before it")


def _called(node: Node, values: Mapping[str, Value]) -> Value:
    module, _, name = node.target.rpartition(".")
    is_method = node.op == "call_method"
    if name not in OPERATIONS or (
        module or name in FUNCTIONS if is_method else module not in MODULES
    ):
        known = ", ".join(sorted(OPERATIONS))
        raise UserError(f"operation {node.target[:80]!r} is not supported; there are: {known}")
    args = [_decoded(one, values) for one in node.args]
    kwargs = {key: _decoded(one, values) for key, one in node.kwargs.items()}
    kwargs = {k: one for k, one in kwargs.items() if one is not None and k not in IGNORED}
    # Python repeats texts and lists, and its numbers have any length
    if name in OPERATORS and not all(isinstance(one, jax.Array | int | float) for one in args):
        raise UserError(f"{node.target} has other arguments than tensors and numbers")
    value: Any = OPERATIONS[name](*args, **kwargs)
    if isinstance(value, int) and abs(value) > MAX_CELLS:
        raise UserError(f"{node.target} makes {value:.3g}; expected a float there")
    return value


def _run(loss: Loss, logprobs: jax.Array, inputs: Sequence[jax.Array]) -> tuple[Value, Value]:
    """Returns the scalar loss of one datum, and its metrics. Raises ``UserError``."""
    given = dict(zip((one.name for one in loss.inputs), (logprobs, *inputs)))
    values: dict[str, Value] = {}
    cells = 0
    with jax.numpy_rank_promotion("allow"):
        for node in loss.graph.nodes:
            try:
                if node.op == "output":
                    return _output(*_decoded(node.args, values))
                is_input = node.op == "placeholder"
                value = given[node.target] if is_input else _called(node, values)
                values[node.name], cells = value, cells + getattr(value, "size", 0)
                if cells > MAX_CELLS:
                    raise UserError(f"{cells} numbers up to here; expected {MAX_CELLS} at most")
            except Exception as error:  # of any operation, for any arguments
                reason = f"{type(error).__name__}: {error}".split("\n")[0][:1500]
                at = f"custom loss {loss.name[:80]!r}, node {node.name[:80]!r}"
                raise UserError(f"{at}: {reason.removeprefix('UserError: ')}") from None
    raise UserError(f"custom loss {loss.name[:80]!r} has no output: return (loss, metrics)")


def _output(returned: tuple[Value, Mapping[str, Value]]) -> tuple[Value, Value]:
    value, metrics = returned
    for name, one in {"the loss": value, **metrics}.items():
        if not isinstance(one, jax.Array) or one.ndim or one.dtype != jnp.float32:
            found = f"{one.dtype} of shape {one.shape}" if isinstance(one, jax.Array) else one
            raise UserError(f"{name[:80]} is {found!s:.80}; expected a scalar float tensor")
        if name != "the loss" and not METRIC.fullmatch(name):
            raise UserError(f"metric {name[:80]!r}; expected custom/NAME:sum or custom/NAME:mean")
    return value, metrics


def create(body: CreateCustomLoss) -> str:
    """Returns the id of a loss. Raises ``UserError`` if it cannot be computed."""
    loss = Loss(name=body.name, inputs=body.inputs, graph=body.graph)
    names = [one.name for one in loss.inputs]
    if names[0] != "logprobs" or loss.inputs[0].rank == 0 or len(set(names)) < len(names):
        raise UserError(f"inputs are {names}; expected logprobs of rank 1 or 2, then other names")
    types = ("int32" if name == "target_tokens" else "float32" for name in names)
    shapes = ((8, 2)[: one.rank] for one in loss.inputs)
    examples = map(jax.ShapeDtypeStruct, shapes, types)
    jax.eval_shape(functools.partial(_gradient, loss), *examples)
    packed = gzip.compress(loss.model_dump_json().encode(), mtime=0)
    return base64.urlsafe_b64encode(packed).decode()


@functools.lru_cache(64)
def of_id(id: str) -> Loss:
    """Inverts ``create``. Raises ``UserError``."""
    try:
        packed = base64.urlsafe_b64decode(id)
    except ValueError:
        raise UserError(f"loss_id is {shown(id)}; expected one of create_custom_loss") from None
    return parse(Loss, decompress(packed, "gzip", MAX_BYTES))


def _gradient(loss: Loss, logprobs: jax.Array, *inputs: jax.Array) -> Any:
    return jax.value_and_grad(lambda x: _run(loss, x, inputs), has_aux=True)(logprobs)


@functools.lru_cache(PROGRAMS)
def _compiled(id: str, shapes: tuple[tuple[tuple[int, ...], str], ...]) -> Callable[..., Any]:
    function = jax.jit(functools.partial(_gradient, of_id(id)))
    return function.lower(*(jax.ShapeDtypeStruct(*one) for one in shapes)).compile()


def differentiate(
    id: str, logprobs: Sequence[np.ndarray], inputs: Sequence[Mapping[str, np.ndarray]]
) -> tuple[float, dict[str, float], list[np.ndarray]]:
    """Returns the sum of the losses of data, their metrics, and minus the gradient at each
    log-probability: as weights of cross-entropy, these give the gradient of the loss. Compiles a
    program for each new shape, on a CPU. Raises ``UserError``.
    """
    total, weights, names = 0.0, [], [one.name for one in of_id(id).inputs[1:]]
    sums: collections.defaultdict[str, float] = collections.defaultdict(float)
    with jax.default_device(jax.devices("cpu")[0]):
        for i, (logp, own) in enumerate(zip(logprobs, inputs, strict=True)):
            arrays = [logp, *(own[name] for name in names)]
            shapes = tuple((x.shape, x.dtype.name) for x in arrays)
            (value, found), gradient = _compiled(id, shapes)(*arrays)
            if not np.isfinite(gradient).all():
                raise UserError(f"the gradient of the custom loss of datum {i} is not finite")
            total += float(value)
            for name, one in found.items():
                sums[name] += float(one) / (len(logprobs) if name.endswith(":mean") else 1)
            weights.append(-np.asarray(gradient))
    return total, dict(sums), weights
