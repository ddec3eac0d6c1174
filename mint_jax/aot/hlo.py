"""Work of a compiled program, read from its text: matrix FLOPs and collectives, with loop bodies
counted as often as they run.

``Compiled.cost_analysis`` counts a loop's body once, however many layers it scans. This module
multiplies each loop by its trip count: the compiler's note, the constant in its condition, or the
caller's statement. Any other loop counts once, and its contents are marked as a minimum.

Bytes of a collective are those that one device sends with the ring algorithm over a group of n.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Mapping

import numpy as np

_BITS = {"pred": 8, "s4": 4, "u4": 4, "f4e2m1fn": 4, "bf16": 16, "c64": 64, "c128": 128}
_INSTRUCTION = re.compile(r"^\s*(ROOT )?%?([\w.\-]+) = (.*?) ([a-z][a-z0-9\-]*)\((.*)$")
_ARRAY = re.compile(r"\b([a-z]+[0-9]*[a-z0-9]*)\[([0-9,]*)\]")
_KERNELS = ("tpu_custom_call", "__gpu$xla.gpu.triton")  # by Pallas
# What a GPU starts no kernel for; a loop and a branch start those in them.
_NO_KERNEL = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all")
COLLECTIVES = {  # kind -> bytes that a device sends for an operand of o bytes in a group of n
    "all-gather": lambda o, n: o * (n - 1),
    "all-reduce": lambda o, n: 2 * o * (n - 1) / n,
    "reduce-scatter": lambda o, n: o * (n - 1) / n,
    "all-to-all": lambda o, n: o * (n - 1) / n,
    "ragged-all-to-all": lambda o, n: o * (n - 1) / n,
    "collective-permute": lambda o, n: o,
    "collective-broadcast": lambda o, n: o,
}


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line: ``%name = type op(operands), attributes``."""

    name: str
    type: str
    op: str
    operands: tuple[str, ...]
    rest: str
    root: bool

    @property
    def channel(self) -> str:
        """Channel of a collective, unique in a module; empty without one."""
        found = re.search(r"\bchannel_id=(\d+)", self.rest)
        return found[1] if found else ""

    def called(self, attribute: str) -> list[str]:
        """Computations named by an attribute: ``calls=%a`` or ``branch_computations={%a, %b}``."""
        found = re.search(rf"\b{attribute}=(\{{[^}}]*\}}|%?[\w.\-]+)", self.rest)
        return re.findall(r"[\w.\-]+", found[1]) if found else []


@dataclasses.dataclass
class Cost:
    """Work of one device in one call of the program."""

    flops: float = 0.0  # FLOPs of dots and convolutions, without hand-written kernels
    # counts, bytes: runs and bytes sent, by collective
    counts: dict[str, float] = dataclasses.field(default_factory=dict)
    bytes: dict[str, float] = dataclasses.field(default_factory=dict)
    kernels: float = 0.0  # calls of hand-written kernels
    unknown_loops: int = 0  # loops counted once because their end depends on data
    # kinds of collectives in such loops; their counts and bytes are minima
    least: frozenset[str] = frozenset()

    def add(self, other: "Cost", times: float = 1.0) -> None:
        self.least |= other.least
        self.flops += times * other.flops
        self.kernels += times * other.kernels
        self.unknown_loops += other.unknown_loops
        for own, theirs in ((self.counts, other.counts), (self.bytes, other.bytes)):
            for kind, value in theirs.items():
                own[kind] = own.get(kind, 0.0) + times * value


class Module:
    """Computations of a module's text.

    Args:
        steps: true if the entry's largest loop of unknown length is a call's step.
        trips: trip counts of loops of unknown length, by the names of ``jax.named_scope`` around
            them, outermost first: ``"teams/runs"``. Scopes that no key names are ignored.
    """

    def __init__(self, text: str, steps: bool = False, trips: Mapping[str, int] | None = None):
        self._said = dict(trips or {})
        self._scopes = {name for path in self._said for name in path.split("/")}
        self.computations: dict[str, list[Instruction]] = {}
        self.types: dict[str, str] = {}
        self.entry = ""
        found = re.search(r"num_partitions=(\d+)", text) or re.search(r"replica_count=(\d+)", text)
        self.devices = int(found[1]) if found else 1
        current: list[Instruction] = []
        for line in text.splitlines():
            if header := re.match(r"^(ENTRY )?%?([\w.\-]+) .*->.*\{\s*$", line):
                current = self.computations.setdefault(header[2], [])
                self.entry = header[2] if header[1] else self.entry
            elif found := _INSTRUCTION.match(line):
                root, name, type_, op, call = found.groups()
                operands, rest = _split_call(call)
                names = tuple(re.findall(r"%([\w.\-]+)", operands))
                current.append(Instruction(name, type_, op, names, rest, bool(root)))
                self.types[name] = type_ + f" = {operands}" * (op == "constant")
        self.channels = self._channels()
        self._step, body = "", self.computations[self.entry] if steps else []
        if loops := [i for i in body if i.op == "while" and self._trips(i) is None]:
            largest = max(loops, key=lambda i: self._of(i.called("body")[0], False).flops)
            self._step = largest.name

    def _channels(self) -> dict[str, str]:
        # A TPU spreads a collective over fusions that compute meanwhile; they share a channel.
        fusions = (i for body in self.computations.values() for i in body if i.op == "fusion")
        fused = {name for i in fusions for name in i.called("calls")}
        return {
            i.channel: name for name in sorted(fused) for i in self.computations[name] if i.channel
        }

    def cost(self) -> Cost:
        """Returns the cost of the entry computation."""
        return self._of(self.entry, False)

    def layer_launches(self, layers: int) -> float:
        """Returns the kernels that a GPU starts in one step of the largest loop over layers."""
        bodies = [
            i.called("body")[0]
            for of_computation in self.computations.values()
            for i in of_computation
            if i.op == "while" and self._trips(i) == layers
        ]
        return max(map(self._launches, bodies))

    def _launches(self, computation: str) -> float:
        """Returns the kernels of a computation, of branches the most."""
        total = 0.0
        for i in self.computations[computation]:
            if i.op == "while":
                total += (self._trips(i) or 1) * self._launches(i.called("body")[0])
            elif i.op == "conditional":
                total += max(map(self._launches, self._branches(i)))
            elif i.op == "call":
                total += self._launches(i.called("to_apply")[0])
            else:
                total += i.op not in _NO_KERNEL and not i.op.endswith("-done")
        return total

    @staticmethod
    def _branches(i: Instruction) -> list[str]:
        two = i.called("true_computation") + i.called("false_computation")
        return i.called("branch_computations") or two

    @functools.cache  # noqa: B019 (a module lives as long as its report)
    def _of(self, computation: str, scattered: bool) -> Cost:
        total = Cost()
        for instruction in self.computations[computation]:
            if self.channels.get(instruction.channel, computation) == computation:
                total.add(*self._of_instruction(instruction, scattered))
        return total

    def _of_instruction(self, i: Instruction, scattered: bool) -> tuple[Cost, float]:
        """Returns cost and multiplicity. ``scattered``: an all-reduce keeps only one slice."""
        kind = i.op.removesuffix("-start")
        if i.op == "while":
            trips = 1 if i.name == self._step else self._trips(i)
            cost = Cost(unknown_loops=int(trips is None))
            cost.add(self._of(i.called("body")[0], False), 1 if trips is None else trips)
            cost.least |= frozenset(cost.counts if trips is None else ())
            return cost, 1
        if i.op == "conditional":
            branches = [self._of(name, False) for name in self._branches(i)]
            return max(branches, key=lambda c: (c.flops, sum(c.bytes.values()))), 1
        if i.op in ("fusion", "call", "async-start"):
            cost = Cost()
            for name in i.called("calls") or i.called("to_apply"):
                cost.add(self._of(name, name.startswith("all-reduce-scatter")))
            return cost, 1
        if kind in COLLECTIVES and not i.op.endswith("-done"):
            kind = "reduce-scatter" if scattered and kind == "all-reduce" else kind
            size = sum(nbytes(self.types[name]) for name in i.operands if name in self.types)
            return Cost(counts={kind: 1}, bytes={kind: COLLECTIVES[kind](size, self._group(i))}), 1
        if i.op == "custom-call":
            return Cost(kernels=1), float(
                any(f'custom_call_target="{kernel}"' in i.rest for kernel in _KERNELS)
            )
        if i.op in ("dot", "convolution"):
            return Cost(flops=self._dot(i) if i.op == "dot" else self._convolution(i)), 1
        return Cost(), 0

    def _group(self, i: Instruction) -> int:
        """Returns the number of devices in ``{{0,1},{2,3}}``, ``[groups,size]<=[...]`` or
        ``mesh['a'=4,'b'=2] {'a'}``.
        """
        if found := re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", i.rest):
            sizes = dict(re.findall(r"'(\w+)'=(\d+)", found[1]))
            return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", found[2]))
        if found := re.search(r"replica_groups=\[(\d+),(\d+)\]", i.rest):
            return int(found[2])
        if found := re.search(r"replica_groups=\{\{([\d,]*)\}", i.rest):
            return found[1].count(",") + 1
        return self.devices

    def _trips(self, loop: Instruction) -> int | None:
        if found := re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.rest):
            return int(found[1])
        condition = self.computations[loop.called("condition")[0]]
        root = next(i for i in condition if i.root)
        inside = self.computations[root.called("calls")[0]] if root.op == "fusion" else condition
        test = next(i for i in inside if i.root)
        if test.op == "compare" and "direction=LT" in test.rest:
            limits = [self._integer(name) for name in {*test.operands, *root.operands}]
            if (trips := next((n for n in limits if n is not None), None)) is not None:
                return trips
        if not (scopes := re.search(r'op_name="([^"]*)"', loop.rest)):
            return None
        return self._said.get("/".join(n for n in scopes[1].split("/") if n in self._scopes))

    def _integer(self, name: str) -> int | None:
        found = re.search(r"^[su]\d+\[\].* = (\d+)$", self.types.get(name, ""))
        return int(found[1]) if found else None

    def _dot(self, i: Instruction) -> float:
        found = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", i.rest)
        lhs, dims = shape(self.types[i.operands[0]]), found[1].split(",") if found else []
        contracted = math.prod(lhs[int(d)] for d in dims if d)
        return 2.0 * math.prod(shape(i.type)) * contracted if found else 0.0

    def _convolution(self, i: Instruction) -> float:
        """Returns the FLOPs of a convolution, as TPUs compute dots."""
        labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", i.rest)
        assert labels, i.rest
        types = *(self.types[name] for name in i.operands[:2]), i.type
        lhs, kernel, out = (dict(zip(of, shape(t))) for of, t in zip(labels.groups(), types))
        window = re.search(r"window=\{([^}]*)\}", i.rest)
        fields = dict(part.split("=") for part in window[1].split()) if window else {}
        fields.pop("size", None)
        products = float(out["b"] * out["f"] * kernel["i"])
        for d in range(len(out) - 2):
            a, k, o = (of[str(d)] for of in (lhs, kernel, out))
            own = {name: value.split("x")[d] for name, value in fields.items()}
            products *= _window_meetings(a, k, o, **own)
        return 2 * products


def _window_meetings(
    a: int, k: int, o: int, stride="1", pad="0_0", lhs_dilate="1", rhs_dilate="1", rhs_reversal="0"
) -> int:
    """Counts pairs of output and window positions that meet an input element."""
    at = (
        np.arange(o)[:, None] * int(stride)
        + np.arange(k)[None] * int(rhs_dilate)
        - int(pad.split("_")[0])
    )
    return int(np.sum((at >= 0) & (at <= (a - 1) * int(lhs_dilate)) & (at % int(lhs_dilate) == 0)))


def _split_call(text: str) -> tuple[str, str]:
    """Splits ``a, b), attributes`` at the closing parenthesis of the call."""
    depth = 1
    for k, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        if depth == 0:
            return text[:k], text[k + 1 :]
    return text, ""


def arrays(type_: str) -> list[str]:
    """Returns the array types in a type, each ``bf16[4,32]``."""
    return [found[0] for found in _ARRAY.finditer(type_)]


def shape(type_: str) -> tuple[int, ...]:
    """Returns the dimensions of an array type ``bf16[4,32]{1,0}``."""
    found = _ARRAY.search(type_)
    return tuple(int(n) for n in found[2].split(",") if n) if found else ()


def nbytes(type_: str) -> float:
    """Returns the bytes of an array type, or of all arrays of a tuple, without tile padding."""
    total = 0.0
    for dtype, dims in _ARRAY.findall(type_):
        bits = _BITS.get(dtype) or int((re.search(r"\d+", dtype) or ["32"])[0])
        total += math.prod(int(n) for n in dims.split(",") if n) * bits / 8
    return total
