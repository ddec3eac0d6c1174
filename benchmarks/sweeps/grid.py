"""A sweep as data: grids of points, figures that others report, and pictures.

A *point* is one combination of a grid's axes: one command, or one per seed. The grid says where its
figures are in the result of the command.
"""

import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from mint_jax.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grid:
    """Points over one job.

    Attributes:
        config: of the job, with its size; {setting} as in options.
        about: what the grid shows, in a line.
        axes: setting -> values; there is a point for each combination.
        without: settings of combinations that are left out.
        options: of the command line; {setting} is a point's value, {workdir} the sweep's folder.
        seeds: one run each, whose numbers are merged; none: one run without a seed.
        minutes: of a run, roughly, for the time left.
        each: setting -> values that one run measures together, a row each.
        figures: name -> path in the run's result: a/b, where name=value finds an entry of a list.
        empty_cache: runs start with an empty cache of compiled programs and converted bases.
        curve: a column of the run's metrics.jsonl that is kept step by step.
        curve_of: name of the rows of that column.
    """

    config: str
    about: str = ""
    axes: dict[str, Any] = dataclasses.field(default_factory=dict)
    without: tuple[Any, ...] = ()
    options: tuple[str, ...] = ()
    seeds: tuple[int, ...] = ()
    minutes: float = 1.0
    each: dict[str, Any] = dataclasses.field(default_factory=dict)
    figures: dict[str, str] = dataclasses.field(default_factory=dict)
    empty_cache: bool = False
    curve: str = ""
    curve_of: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reference:
    """Figures of the same quantity that others report, ``who`` in ``source``; ``settings`` are
    those of the measurement, ``note`` says how it differs from ours.
    """

    who: str
    source: str
    grid: str
    settings: dict[str, Any]
    figures: dict[str, Any]
    note: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Picture:
    """A picture of a grid.

    Attributes:
        kind: lines (a figure over a setting) or curves (over steps, with bands).
        by: settings that part the rows into lines; all others must be of one value, or are panels.
        panels: setting of which each value has a panel of its own.
        log: axes with a logarithmic scale: x, y or xy.
    """

    grid: str
    kind: str = "lines"
    x: str = ""
    y: str = ""
    by: tuple[str, ...] = ()
    panels: str = ""
    log: str = ""


class Point(NamedTuple):
    """One combination of the axes of the grid ``of``, whose name is ``grid``."""

    grid: str
    of: Grid
    settings: dict[str, Any]

    @property
    def name(self) -> str:
        """Names the point, and its folder."""
        words = (f"{key}={value}" for key, value in self.settings.items())
        return "-".join([self.grid, *(re.sub(r"[^\w.=]+", "_", word) for word in words)])

    def arguments(self) -> list[str]:
        """Config and options of the command line, with places still to be filled in."""
        values, where = self.settings | {"workdir": "{workdir}"}, f"grids.{self.grid}.options"
        return [_fill(t, values, where) for t in (f"--config={self.of.config}", *self.of.options)]

    def rows(self) -> Iterator[dict[str, Any]]:
        """The settings of each row that the point's run measures."""
        for values in itertools.product(*self.of.each.values()):
            yield self.settings | dict(zip(self.of.each, values))


def points_of(grids: Mapping[str, Grid]) -> list[Point]:
    """All points, grid by grid."""
    points = []
    for name, grid in grids.items():
        for axis, values in (*grid.axes.items(), *grid.each.items()):
            if not isinstance(values, tuple | list) or not values:
                raise UserError(
                    f"grids.{name}: {axis} is {values!r}; expected a tuple with at least one value"
                )
        whole = [dict(zip(grid.axes, values)) for values in itertools.product(*grid.axes.values())]
        without = [dict(one).items() for one in grid.without]
        points += [
            Point(name, grid, one) for one in whole if not any(w <= one.items() for w in without)
        ]
    for point in points:  # before any of them runs
        point.arguments()
        for row in point.rows():
            for path in point.of.figures.values():
                _fill(path, row, f"grids.{point.grid}.figures")
    names = [point.name for point in points]
    if twice := {name for name in names if names.count(name) > 1}:
        raise UserError(f"two points are called {sorted(twice)[0]}: give an axis each value once")
    return points


def figure_at(result: Any, path: str, settings: Mapping[str, Any]) -> Any:
    """Returns the value at a path of a result: names joined by ``/``; ``name=value`` is the first
    such entry of a list, and ``{setting}`` a value of the row's.
    """
    found, filled = result, _fill(path, settings, "figures")
    for part in filled.split("/"):
        if isinstance(found, list):
            name, _, value = part.partition("=")
            found = next((entry for entry in found if str(entry.get(name)) == value), None)
            if found is None:
                raise KeyError(f"the result has no {filled}: no entry with {part}")
        elif isinstance(found, Mapping) and part in found:
            found = found[part]
        else:
            raise KeyError(f"the result has no {filled}: no {part}")
    return found


def _fill(template: str, values: Mapping[str, Any], where: str) -> str:
    try:
        return template.format(**values)
    except (KeyError, IndexError) as error:
        raise UserError(
            f"{where} has {template!r}, but there is no setting {error}: there are"
            f" {', '.join(values)}"
        ) from None
