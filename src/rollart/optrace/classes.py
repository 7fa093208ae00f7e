"""Ranks that cannot be told apart: one class for each stage of the pipeline, and more where some ranks are slower.

Owns the numbering of ranks (tensor parallel innermost, then context, data, pipeline; experts over consecutive ranks of a
stage), the groups of each axis, and the partition of ranks into classes. Invariant: two ranks of a class have the same work,
and in every one of their groups the same classes, so one of them stands for all; the number of classes does not grow with
the number of ranks. Why: data-parallel replicas and tensor-parallel peers do the same at the same time, unless one of them
is late, and then what matters of the others is only how they stand to the late one (found by colour refinement).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from statistics import NormalDist
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rollart.core.errors import ConfigError
from rollart.core.seeds import unit
from rollart.optrace.ops import Trace
from rollart.perf.pipeline import balanced_layers
from rollart.perf.train_plan import TrainingPlan

Special = Literal["only", "first", "middle", "last"]
MOST_REPLICAS = 4
"""Replicas that jitter keeps apart: the slowest ones decide a step, the rest are taken to be like the fastest of them."""
EXPERTS = "experts"
"""The group that reduces gradients of experts: ranks of a stage as far apart as an expert group is wide."""
_GROUPS = ("tp", "cp", "dp", "ep", EXPERTS, "pp")
Ranks = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """A rank whose computation takes `factor` times as long, and which begins the step `delay_s` seconds late."""

    rank: int
    factor: float = 1.0
    delay_s: float = 0.0

    def __post_init__(self) -> None:
        if not (isfinite(self.factor) and self.factor > 0 and isfinite(self.delay_s) and self.delay_s >= 0):
            raise ConfigError(
                f"straggler {self.rank}: factor {self.factor}, delay {self.delay_s} s; need a factor above 0, a delay from 0"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankClass:
    """`ranks` ranks of one stage that do the same at the same time; `representative` is the first of them."""

    index: int
    name: str
    stage: int
    special: Special
    ranks: int
    representative: int
    factor: float = 1.0
    delay_s: float = 0.0
    partners: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """By axis (and `EXPERTS`), the classes that a rank of this one meets in its group, itself included, rising; `pp`: one of
    each stage, first to last."""


def stage_parts(trace: Trace, plan: TrainingPlan, head_layers: float = 0.0) -> tuple[tuple[str, ...], ...]:
    """Names of the parts of each virtual stage (chunk x stages + stage), first to last.

    `head_layers`: what the output head costs, in layers. Raises `ConfigError` when a stage would have no layer.
    """
    places = plan.pp * (plan.chunks if plan.schedule == "interleaved" else 1)
    depth = len(trace.layers)
    if places > depth:
        raise ConfigError(
            f"{trace.model} has {depth} layers, too few for pp {plan.pp} x {places // plan.pp} chunks; at most {depth} in all"
        )
    counts = balanced_layers(depth, places, first_extra=0.0, last_extra=head_layers)
    if min(counts) == 0:  # a head that weighs more than a stage's share: every stage still gets a layer
        more = balanced_layers(depth - places, places, first_extra=0.0, last_extra=head_layers)
        counts = tuple(1 + count for count in more)
    found, begin = [], 0
    for place, count in enumerate(counts):
        names = list(trace.layers[begin : begin + count])
        begin += count
        if place == 0:
            names.insert(0, trace.embedding)
        if place == places - 1:
            names.append(trace.head)
        found.append(tuple(names))
    return tuple(found)


def rank_classes(
    trace: Trace, plan: TrainingPlan, *, stragglers: Sequence[Straggler] = (), jitter: float = 0.0, seed: int = 0,
    every_rank: bool = False,
) -> tuple[RankClass, ...]:  # fmt: skip
    """The classes of a plan, by stage and then by representative; see `classes_of`."""
    return classes_of(
        plan, stragglers=stragglers, jitter=jitter, seed=seed, every_rank=every_rank, model=trace.model
    )  # fmt: skip


def classes_of(
    plan: TrainingPlan, *, stragglers: Sequence[Straggler] = (), jitter: float = 0.0, seed: int = 0, every_rank: bool = False,
    model: str = "the model",
) -> tuple[RankClass, ...]:  # fmt: skip
    """The classes of a plan, by stage and then by representative, whatever it trains.

    `jitter`: standard deviation of the log of each rank's slowness (drawn by rank from `seed`); ranks that wait for each
    other layer by layer go as the slowest of them. `every_rank`: one class for each rank, to check the rest against.
    Raises `ConfigError` for expert groups that do not divide a stage, a rank that does not exist, or a senseless jitter.
    """
    shape = (plan.pp, plan.dp, plan.cp, plan.tp)
    within = plan.dp * plan.cp * plan.tp
    if within % plan.ep:
        near = max(size for size in range(1, plan.ep) if within % size == 0)
        raise ConfigError(f"ep {plan.ep} does not divide the {within} ranks of a stage of {model}; nearest is {near}")
    if not 0.0 <= jitter < 1.0:
        raise ConfigError(f"jitter {jitter} must be a standard deviation of 0 or more, below 1")
    if not (stragglers or jitter or every_rank):
        return _uniform(plan)
    factor = _jittered(plan, jitter, seed) if jitter else np.ones(shape)
    delay = np.zeros(shape)
    for late in stragglers:
        if not 0 <= late.rank < plan.devices:
            raise ConfigError(f"straggler {late.rank}: ranks are 0 to {plan.devices - 1}")
        place = np.unravel_index(late.rank, shape)
        factor[place] *= late.factor
        delay[place] += late.delay_s
    numbers: Ranks = np.arange(plan.devices).reshape(shape)
    stage = np.broadcast_to(np.arange(plan.pp).reshape(-1, 1, 1, 1), shape)
    said = [stage.ravel(), factor.ravel(), delay.ravel()] + ([numbers.ravel()] if every_rank else [])
    colour = _refined(_numbered(np.stack(said, axis=1)).reshape(shape), plan)
    return _from_colours(colour, factor, delay, plan)


def check_called(names: Iterable[str], classes: Sequence[RankClass]) -> None:
    """Raise `ConfigError` unless there are classes of these names to delay."""
    unknown = sorted(set(names) - {one.name for one in classes})
    if unknown:
        raise ConfigError(
            f"no rank class called {', '.join(map(repr, unknown))} to delay; there are {', '.join(one.name for one in classes)}"
        )


# ---- all alike


def _special(stage: int, stages: int) -> Special:
    if stages == 1:
        return "only"
    return "first" if stage == 0 else "last" if stage == stages - 1 else "middle"


def _uniform(plan: TrainingPlan) -> tuple[RankClass, ...]:
    within = plan.devices // plan.pp
    column = tuple(range(plan.pp))
    return tuple(
        RankClass(
            index=stage, name=f"stage {stage}", stage=stage, special=_special(stage, plan.pp), ranks=within,
            representative=stage * within,
            partners={axis: column if axis == "pp" else (stage,) for axis in _GROUPS},
        )
        for stage in range(plan.pp)
    )  # fmt: skip


# ---- some slower than others


def _jittered(plan: TrainingPlan, jitter: float, seed: int) -> NDArray[np.float64]:
    """Factor of every rank: all that wait for each other inside a layer have the slowest one's; of the replicas only the
    slowest keep their own."""
    drawn = [NormalDist().inv_cdf(unit(seed, "jitter", rank)) for rank in range(plan.devices)]
    own = np.exp(jitter * np.array(drawn)).reshape(plan.pp, plan.dp, plan.cp * plan.tp)
    coupled = max(1, -(-plan.ep // (plan.cp * plan.tp)))  # replicas that an expert group spans
    if plan.dp % coupled:
        coupled = plan.dp
    cells = own.reshape(plan.pp, plan.dp // coupled, -1).max(axis=2)  # (stages, replicas)
    bound = plan.micro_batches * cells.max(axis=0) + cells.sum(axis=0) - cells.max(axis=0)  # closed form of 1F1B
    slowest = np.argsort(-bound, kind="stable")
    cells[:, slowest[MOST_REPLICAS:]] = cells[:, slowest[min(MOST_REPLICAS, len(slowest)) - 1]][:, None]
    return np.repeat(cells, coupled, axis=1)[:, :, None, None] * np.ones((1, 1, plan.cp, plan.tp))


def _numbered(rows: NDArray[np.float64] | Ranks) -> Ranks:
    """Equal rows get equal numbers."""
    _, inverse = np.unique(rows, axis=0, return_inverse=True)
    found: Ranks = inverse.reshape(-1).astype(np.int64)
    return found


def _by_group(values: Ranks, axis: str, plan: TrainingPlan) -> Ranks:
    """Values of (stage, dp, cp, tp) as (groups of an axis, members), or of the column of stages for `pp`."""
    if axis == "tp":
        return values.reshape(-1, plan.tp)
    if axis == "cp":
        return values.transpose(0, 1, 3, 2).reshape(-1, plan.cp)
    if axis == "dp":
        return values.transpose(0, 3, 1, 2).reshape(-1, plan.dp * plan.cp)
    if axis == "ep":
        return values.reshape(-1, plan.ep)
    if axis == EXPERTS:
        return values.reshape(plan.pp, -1, plan.ep).transpose(0, 2, 1).reshape(plan.pp * plan.ep, -1)
    return values.transpose(1, 2, 3, 0).reshape(-1, plan.pp)


def _refined(colour: Ranks, plan: TrainingPlan) -> Ranks:
    """The coarsest partition finer than `colour` in which ranks of one colour have groups of the same colours."""
    numbers: Ranks = np.arange(plan.devices).reshape(colour.shape)
    places = [(axis, _by_group(numbers, axis, plan)) for axis in _GROUPS]
    count = 0
    while count < (now := int(colour.max()) + 1):
        count = now
        flat = colour.ravel()
        said = [flat]
        for axis, groups in places:
            met = flat[groups]
            kinds = _numbered(met if axis == "pp" else np.sort(met, axis=1))
            of_rank = np.empty(plan.devices, dtype=np.int64)
            of_rank[groups] = kinds[:, None]
            said.append(of_rank)
        colour = _numbered(np.stack(said, axis=1)).reshape(colour.shape)
    return colour


def _from_colours(
    colour: Ranks, factor: NDArray[np.float64], delay: NDArray[np.float64], plan: TrainingPlan
) -> tuple[RankClass, ...]:
    flat = colour.ravel()
    _, first, counts = np.unique(flat, return_index=True, return_counts=True)
    by_first = np.argsort(first)  # ranks are numbered by stage, so this is by stage too
    index_of = np.empty(len(first), dtype=np.int64)
    index_of[by_first] = np.arange(len(first))
    index = index_of[flat]
    representatives = [int(first[colour_number]) for colour_number in by_first]
    numbers: Ranks = np.arange(plan.devices).reshape(colour.shape)
    groups = {axis: _by_group(numbers, axis, plan) for axis in _GROUPS}
    home = {axis: np.empty(plan.devices, dtype=np.int64) for axis in _GROUPS}
    for axis, rows in groups.items():
        home[axis][rows] = np.arange(len(rows))[:, None]
    within = plan.devices // plan.pp
    alone = len(representatives) == plan.pp
    found = []
    for number, rank in enumerate(representatives):
        stage = rank // within
        met = {axis: index[groups[axis][home[axis][rank]]] for axis in _GROUPS}
        found.append(
            RankClass(
                index=number, name=f"stage {stage}" if alone else f"stage {stage} rank {rank}", stage=stage,
                special=_special(stage, plan.pp), ranks=int(counts[by_first[number]]), representative=rank,
                factor=float(factor.ravel()[rank]), delay_s=float(delay.ravel()[rank]),
                partners={
                    axis: tuple(int(other) for other in (members if axis == "pp" else np.unique(members)))
                    for axis, members in met.items()
                },
            )
        )  # fmt: skip
    return tuple(found)
