"""A metric row and the statistics that fill it.

Invariant: a key is `<area>/<task|all>/<name>/<stat>` and stands in `metric_names.METRICS`; the statistics of a name are
those of the table, so a name cannot be written in two ways.
"""

from __future__ import annotations

from collections.abc import Sequence

from rollart.observe.metric_names import lookup
from rollart.observe.tally import Stat

Row = dict[str, float]
Values = list[float | None]
STEP = "train/step"
MOST_KEPT = 256
"""Values of one quantity that are kept before they are added up: more save nothing, and memory is not the run's."""


def put(row: Row, area: str, scope: str, name: str, **stats: float | None) -> None:
    """`stats` by name of the statistic; None is left out. A slash in a name given by others would shift the parts of the
    key, so it becomes a dot."""
    for stat, value in stats.items():
        if value is not None:
            row[f"{area}/{scope}/{name.replace('/', '.')}/{stat}"] = value


def in_order(row: Row) -> Row:
    """The step first, then by name."""
    return {STEP: row[STEP], **{key: row[key] for key in sorted(row) if key != STEP}}


class Tallies:
    """Statistics by (area, name, scope); what is noted for a task counts for `all` as well.

    Values are kept as they come and added up when somebody asks, or when `MOST_KEPT` of a quantity have gathered: a run notes
    some ten of them for every turn. Sums grow in the order in which values were noted, so they are the same to the last bit.
    """

    __slots__ = ("_kept", "_stats", "_to")

    def __init__(self) -> None:
        self._stats: dict[tuple[str, str, str], Stat] = {}
        self._kept: dict[tuple[str, str, str], Values] = {}
        self._to: dict[tuple[str, str, str], tuple[Values, Values]] = {}
        """By (area, task, name): where a value of a task goes, its own list and that of all tasks."""

    def note(self, area: str, task: str, name: str, value: float | None = 1.0) -> None:
        own, everyone = self._to.get((area, task, name)) or self._open(area, task, name)
        everyone.append(value)
        if own is not everyone:
            own.append(value)
        if len(everyone) >= MOST_KEPT:
            self._add_up()

    def note_all(self, area: str, task: str, name: str, values: Sequence[float | None]) -> None:
        """Each of them, in order."""
        own, everyone = self._to.get((area, task, name)) or self._open(area, task, name)
        everyone.extend(values)
        if own is not everyone:
            own.extend(values)
        if len(everyone) >= MOST_KEPT:
            self._add_up()

    def total(self, area: str, scope: str, name: str) -> float:
        self._add_up()
        stat = self._stats.get((area, name, scope))
        return stat.total if stat else 0.0

    def into(self, row: Row) -> None:
        self._add_up()
        for (area, name, scope), stat in self._stats.items():
            metric = lookup(area, name)
            if metric is None or (metric.scope == "task" and scope == "all"):
                continue
            values: dict[str, float | None] = {
                "mean": stat.mean,
                "std": stat.std,
                "min": stat.min,
                "max": stat.max,
                "sum": stat.total,
            }
            values["count"] = stat.n
            put(row, area, scope, name, **{kind: values.get(kind) for kind in metric.stats})

    def _open(self, area: str, task: str, name: str) -> tuple[Values, Values]:
        own, everyone = (self._kept.setdefault((area, name, scope), []) for scope in (task, "all"))
        for scope in (task, "all"):
            self._stats.setdefault((area, name, scope), Stat())
        self._to[area, task, name] = own, everyone
        return own, everyone

    def _add_up(self) -> None:
        for key, values in self._kept.items():
            if values:
                self._stats[key].add_all(values)
                values.clear()
