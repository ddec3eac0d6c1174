"""Final schedule of a kernel, read from the TPU compiler's dump: bundles, and the loops and
branches that contain them.

A bundle is the set of instructions that a core's units start in one cycle if nothing waits. Its
count is static and not a time: it ignores late copies and stalls. The dump's format is the
compiler's own; unreadable parts raise an error.
"""

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Iterator

from mint_jax.errors import UserError

# further counts -> word in the dump
WORDS = {"vmatmul": "vmatmul", "vmatpush": "vmatpush", "spills": "_spill]"}

_BUNDLE = re.compile(r"^ *(0x[0-9a-f]+|0)\s+(LB|LH|LE|PB|PF|CT)?: +>*\s*\{(.*)")
_BRANCH = re.compile(r"sbr\.rel .*?target = \$region(\d+)")
_REGION = re.compile(r"Start(?:/End empty)? region (\d+)")


@dataclasses.dataclass
class Part:
    """Part of a schedule: the kernel, a ``loop``, or a ``branch`` that a condition skips.

    Attributes:
        first, behind: start line, and the line that follows it.
        lines: its bundles, without those of its parts.
    """

    kind: str
    first: int
    behind: int
    parts: list["Part"] = dataclasses.field(default_factory=list)
    lines: list[str] = dataclasses.field(default_factory=list)

    def has(self, pattern: str) -> bool:
        """Returns true if an instruction is in the part or in its parts."""
        return any(re.search(pattern, line) for part in self.walk() for line in part.lines)

    def walk(self) -> Iterator["Part"]:
        """Yields the part and everything in it, in schedule order."""
        yield self
        for part in self.parts:
            yield from part.walk()

    def run(self, times: Callable[["Part"], int]) -> Counter[str]:
        """Counts bundles and ``WORDS`` of one run; each inner part runs ``times(part)`` times per
        run of its parent.
        """
        total = Counter({"bundles": len(self.lines)})
        total.update(
            {name: sum(line.count(word) for line in self.lines) for name, word in WORDS.items()}
        )
        for part in self.parts:
            if n := times(part):
                total.update({name: n * count for name, count in part.run(times).items()})
        return total


def parse(dump: str) -> Part:
    """Parses a ``final_bundles`` file."""
    lines, regions, blocks = [], {}, []
    for text in dump.splitlines():
        if found := _BUNDLE.match(text):
            lines.append(found[3])
            if found[2]:
                blocks.append(len(lines) - 1)
        elif lines:
            lines[-1] += " " + text
        if lines:
            regions.update({int(n): len(lines) - 1 for n in _REGION.findall(text)})
    if not lines:
        raise UserError("the compiler's dump has no bundles: its form has changed")
    branches = [(at, int(n)) for at, line in enumerate(lines) for n in _BRANCH.findall(line)]
    # Some bundles behind a branch still run before it is taken, four on most chips and one on a
    # TPU7x: a block begins right behind them.
    late = min((block - at for at, _ in branches for block in blocks if block > at), default=1)
    kernel, spans = Part("kernel", 0, len(lines)), set()
    if len(lost := {n for _, n in branches} - set(regions)) > 1:
        raise UserError(
            f"the compiler's dump has branches to regions {sorted(lost)}, which begin nowhere: its"
            " form has changed"
        )
    # one is the exit: the second core of a chip has nothing to do
    regions.update(dict.fromkeys(lost, len(lines)))
    for at, n in branches:
        end = regions[n]
        spans.add((at + late, end, "branch") if end > at else (end, at + late, "loop"))
    for first, behind, kind in sorted(spans, key=lambda span: (span[0], -span[1], span[2])):
        if behind > first:
            _insert(kernel, Part(kind, first, behind))
    parts = [*kernel.walk()]  # the innermost of several comes last
    for at, line in enumerate(lines):
        *_, part = (one for one in parts if one.first <= at < one.behind)
        part.lines.append(line)
    return kernel


def _insert(whole: Part, part: Part) -> None:
    for inner in whole.parts:
        if inner.first <= part.first and part.behind <= inner.behind:
            _insert(inner, part)
            return
        if part.first < inner.behind and inner.first < part.behind:
            raise UserError(
                f"bundles {part.first} to {part.behind} and {inner.first} to {inner.behind} cross:"
                " the dump's form has changed"
            )
    whole.parts.append(part)
