"""A metric row and the statistics that fill it.

Invariant: a key is `<area>/<task|all>/<name>/<stat>` and stands in `metric_names.METRICS`; the statistics of a name are
those of the table, so a name cannot be written in two ways.
"""

from __future__ import annotations

from rollart.observe.metric_names import lookup
from rollart.observe.tally import Stat

Row = dict[str, float]
STEP = "train/step"


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
    """Statistics by (area, name, scope); what is noted for a task counts for `all` as well."""

    def __init__(self) -> None:
        self._stats: dict[tuple[str, str, str], Stat] = {}

    def note(self, area: str, task: str, name: str, value: float | None = 1.0) -> None:
        self._at(area, task, name).add(value)
        if task != "all":
            self._at(area, "all", name).add(value)

    def total(self, area: str, scope: str, name: str) -> float:
        stat = self._stats.get((area, name, scope))
        return stat.total if stat else 0.0

    def into(self, row: Row) -> None:
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

    def _at(self, area: str, scope: str, name: str) -> Stat:
        key = (area, name, scope)
        stat = self._stats.get(key)
        if stat is None:
            stat = self._stats[key] = Stat()
        return stat
