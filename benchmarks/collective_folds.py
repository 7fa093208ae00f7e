"""Splits of collective rows and the errors on what they hold back.

Each split refits constants and curves on the rest: octaves of message size, rank counts of a device, whole (device,
interconnect) pairs; and beside these a tenth of the curves, where other operations may still tell a held-back rank count.
Rows equal in (op, gpu, ranks, nodes, bytes) are in one fold of each, as a fold is a function of these.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from math import floor, log2

from micro_rows import CollectiveRow, digest
from rollart.perf.collective_fit import LatencyBandwidth, Timed, curves_of, fit, fit_latency_bandwidth
from rollart.perf.collective_table import CollectiveModel, estimate

FOLDS = 5
CURVE_FOLDS = 10
SPLITS = ("sizes", "ranks", "device")
Predict = Callable[[CollectiveRow], float]


def timed(row: CollectiveRow) -> Timed:
    """The row as the fit takes it."""
    return Timed(request=row.request, device=row.device, library=row.library, seconds=row.seconds, source=row.source)


def size_fold(row: CollectiveRow) -> Hashable:
    """Every fifth octave of bytes, of all curves at once: no neighbour in size is left within the octave."""
    return floor(log2(row.request.payload_bytes) + 1e-9) % FOLDS


def pair(row: CollectiveRow) -> tuple[str, str]:
    """(device, interconnect): the chip, and NVLink, PCIe or the network between domains."""
    fabric = row.request.fabric
    return (fabric.chip, "network" if (row.request.nodes or 1) > 1 else fabric.kind)


def rank_fold(row: CollectiveRow) -> Hashable:
    """A rank count of a device, of all operations and all sources at once."""
    return (*pair(row), row.request.ranks)


def curve_fold(row: CollectiveRow) -> Hashable:
    """A tenth of the (operation, device, ranks) curves, by digest."""
    return int(digest(row.request.op, row.device, row.request.ranks, row.request.nodes), 16) % CURVE_FOLDS


FOLD_OF: dict[str, Callable[[CollectiveRow], Hashable]] = {
    "sizes": size_fold,
    "ranks": rank_fold,
    "device": pair,
    "curves": curve_fold,
}


def by_model(model: CollectiveModel, row: CollectiveRow) -> float:
    """Seconds by curves and constants."""
    return estimate(model, row.request, row.device, row.library).seconds


def curve_of(row: CollectiveRow) -> Hashable:
    """Rows of one curve."""
    return (row.request.op, row.device, row.library, row.request.fabric, row.request.ranks, row.request.nodes)


def operation_of(row: CollectiveRow) -> Hashable:
    """Rows of one operation of one device, at whatever ranks."""
    return f"{row.request.op} on {row.device} over {pair(row)[1]}"


def everything(_row: CollectiveRow) -> Hashable:
    """All rows."""
    return "everything"


LAW_GROUP: dict[str, Callable[[CollectiveRow], Hashable]] = {
    "sizes": curve_of, "ranks": operation_of, "curves": operation_of, "device": everything,
}  # fmt: skip
"""Rows that share the law's two parameters: a curve; an operation of a device; everything."""


Laws = dict[Hashable, LatencyBandwidth]


def laws(rows: Sequence[CollectiveRow], group: Callable[[CollectiveRow], Hashable]) -> Laws:
    """The two-parameter law of each group, and that of everything."""
    groups: dict[Hashable, list[Timed]] = {"everything": [timed(row) for row in rows]}
    for row in rows:
        if group is not everything:
            groups.setdefault(group(row), []).append(timed(row))
    return {key: fit_latency_bandwidth(members) for key, members in groups.items()}


def by_law(found: Laws, group: Callable[[CollectiveRow], Hashable], row: CollectiveRow) -> float:
    """Seconds by the law of the row's group; a group that was not fitted takes that of everything."""
    return found.get(group(row), found["everything"]).seconds(row.request)


def sizes_of_these(model: CollectiveModel, rows: Sequence[CollectiveRow]) -> list[float]:
    """Relative errors of `rows`, each octave told by curves of the other octaves of these rows, the constants left alone."""
    errors: list[float] = []
    for fold in range(FOLDS):
        rest = [timed(row) for row in rows if size_fold(row) != fold]
        own = CollectiveModel(constants=model.constants, curves=curves_of(rest, model.constants))
        errors += [abs(by_model(own, row) / row.seconds - 1) for row in rows if size_fold(row) == fold]
    return errors


def held_back(rows: Sequence[CollectiveRow], split: str) -> dict[str, list[float | None]]:
    """Relative errors of every row, by predictor, None where the rest is empty.

    `model` is what the package would do with the rest: for `device` by its constants alone, else by its curves too; `carried`
    is by curves always, those of other devices for `device`; `law` is the two-parameter law.
    """
    folds = [FOLD_OF[split](row) for row in rows]
    errors: dict[str, list[float | None]] = {name: [None] * len(rows) for name in ("model", "law", "carried")}
    for fold in sorted(set(folds), key=repr):
        rest = [row for row, place in zip(rows, folds, strict=True) if place != fold]
        if not rest:
            continue
        full = fit([timed(row) for row in rest])
        alone = CollectiveModel(constants=full.constants)
        predictors: dict[str, Predict] = {
            "model": partial(by_model, alone if split == "device" else full),
            "carried": partial(by_model, full),
            "law": partial(by_law, laws(rest, LAW_GROUP[split]), LAW_GROUP[split]),
        }
        for place, row in enumerate(rows):
            if folds[place] == fold:
                for name, predict in predictors.items():
                    errors[name][place] = abs(predict(row) / row.seconds - 1)
    return errors
