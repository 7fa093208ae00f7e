"""The figures of runs as text: one run, several side by side, a prediction against what was measured.

Invariant: every block says whether its figures are simulated or measured, and a simulated one what they rest on.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from rollart.cli.tables import amount, duration, table
from rollart.observe.fault_tally import KINDS, FaultFigures, counted
from rollart.observe.outlook import Outlook
from rollart.observe.step_tally import TRAINER, TRAJECTORY

NONE = "-"
NEARLY_NONE = 5e-4


def percent(share: float) -> str:
    """Two digits; what is below a twentieth of a per cent is none."""
    return f"{100 * share:.0f} %" if share >= 0.1 or share < NEARLY_NONE else f"{100 * share:.2g} %"


def words(name: str) -> str:
    return name.replace("_", " ")


def _said(shares: Mapping[str, float]) -> str:
    """Largest first; parts that would read as 0 are left out."""
    ordered = sorted(shares.items(), key=lambda item: -item[1])
    return ", ".join(f"{words(name)} {percent(share)}" for name, share in ordered if share >= NEARLY_NONE)


# --- one run ---------------------------------------------------------------------------------------------------------


def described(name: str, found: Outlook) -> str:
    """A few lines with everything that is known of a run's figures."""
    kind = "simulated" if found.basis else "measured"
    rows = [(line, text) for line, text in _lines(found) if text]
    parts = [f"{name}: {kind}, from the end of the first step to the end of the last", table(rows, indent="  ")]
    if found.basis:
        parts += ["simulated; rests on:", *(f"  {line}" for line in found.basis)]
    if found.notes:
        parts += ["to know:", *(f"  {line}" for line in found.notes)]
    return "\n".join(parts)


def _lines(found: Outlook) -> Iterable[tuple[str, str]]:
    step = found.step_s
    yield (
        "step time",
        f"{duration(step.median)} median, {duration(step.mean)} mean, {duration(step.p10)} to {duration(step.p90)} from p10 to "
        f"p90 (spread {step.spread:.2f}); {found.steps} steps",
    )
    yield (
        "throughput",
        f"{amount(found.trajectories_per_s)} trajectories/s, {amount(found.tokens_per_s)} tokens/s; sampled "
        f"{amount(found.sampled_tokens_per_s)}, trained {amount(found.trained_tokens_per_s)}",
    )
    life = f"{duration(found.trajectory_s)}: " if found.trajectory_s is not None else ""
    yield "a trajectory", life + _said(found.trajectory)
    yield "the trainer", _said(found.trainer)
    yield "utilisation", "; ".join(_utilised(found))
    yield "staleness", staleness(found)
    yield (
        "waste",
        f"{percent(found.wasted)} of the tokens trained or dropped"
        + (f": {_said(found.waste)}" if found.waste else ""),
    )
    failed = ", ".join(f"{what} {amount(n)}" for what, n in found.failed.items())
    yield "failed attempts", f"{failed} for each trained trajectory" if failed else ""
    yield from _faulted(found.faults)
    yield "recomputed", f"{percent(found.rebuilt)} of the prompt tokens computed"
    yield (
        "fallback",
        f"{percent(found.fallback)} of the turns, to another pool than affinity prefers" if found.fallback else "",
    )
    yield "rewards", _rewards(found.rewards)
    yield "cost", _cost(found)


def _faulted(faults: FaultFigures | None) -> Iterable[tuple[str, str]]:
    """What was lost in the whole run, and what that cost."""
    if faults is None:
        return
    yield "lost, whole run", faults.lost
    down = [
        f"engines {percent(faults.engines_down)} of their time" if faults.engines_down_s else "",
        f"env hosts {duration(faults.hosts_down_s)}" if faults.hosts_down_s else "",
        f"trainer {duration(faults.trainer_down_s)}, {counted(faults.repeated_steps, 'step', 'steps')} repeated"
        if faults.trainer_down_s
        else "",
        f"rewards {duration(faults.rewards_down_s)}" if faults.rewards_down_s else "",
    ]
    yield "  time without", "; ".join(part for part in down if part)
    yield (
        "  work",
        ""
        if not faults.happened
        else f"{counted(faults.moved, 'trajectory', 'trajectories')} moved to another engine, "
        f"{counted(faults.again, 'attempt', 'attempts')} ended; {amount(faults.wasted_tokens)} tokens wasted "
        f"({percent(faults.wasted)})",
    )


def _utilised(found: Outlook) -> Iterable[str]:
    for name, pool in found.pools.items():
        yield f"{name} {percent(pool.utilisation)} ({amount(pool.engines)} engines, {amount(pool.live)} live turns each)"
    yield f"{found.trains} trains {percent(found.trainer['training'])}"


def staleness(found: Outlook) -> str:
    """Mean and largest, and whether there is a bound."""
    if found.staleness_mean is None or found.staleness_max is None:
        return ""
    said = f"{found.staleness_mean:.2f} mean, {found.staleness_max:.0f} at most"
    if found.bound_holds:
        return f"{said}, bound {found.staleness_bound}"
    return f"{said}; checked at admission only, so the bound of {found.staleness_bound} does not hold"


def _rewards(used: Mapping[str, float]) -> str:
    if not used or not used["calls"]:
        return ""
    calls = used["calls"]
    return (
        f"{calls:.0f} calls, {duration(used['busy_s'] / calls)} each, {duration(used['queue_s'] / calls)} in the queue, "
        f"{duration(used['cold_s'] / calls)} for cold starts; {used['timeouts']:.0f} timeouts"
    )


def _cost(found: Outlook) -> str:
    if found.cost is None:
        return ""
    parts = ", ".join(f"{pool} {amount(cost)}" for pool, cost in found.costs.items())
    return f"{amount(found.cost)} H20 hours per 1,000 trajectories: {parts}"


# --- several ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One line of a table."""

    name: str
    of: Callable[[Outlook], float | None]
    show: Callable[[float], str] = amount


def figures(found: Iterable[Outlook]) -> list[Figure]:
    """What can be compared between these runs."""
    every = list(found)
    pools = sorted({pool for one in every for pool in one.pools})
    reasons = sorted({reason for one in every for reason in one.waste})
    return [
        Figure(name="step time, median", of=lambda one: one.step_s.median, show=duration),
        Figure(name="step time, p10", of=lambda one: one.step_s.p10, show=duration),
        Figure(name="step time, p90", of=lambda one: one.step_s.p90, show=duration),
        Figure(name="trajectories/s", of=lambda one: one.trajectories_per_s),
        Figure(name="tokens/s", of=lambda one: one.tokens_per_s),
        *(_share("trajectory", part, lambda one: one.trajectory) for part in TRAJECTORY),
        *(_share("trainer", part, lambda one: one.trainer) for part in TRAINER),
        *(_used(pool) for pool in pools),
        Figure(name="staleness, mean", of=lambda one: one.staleness_mean),
        Figure(name="staleness, largest", of=lambda one: one.staleness_max),
        Figure(name="waste", of=lambda one: one.wasted, show=percent),
        *(_share("waste", reason, lambda one: one.waste) for reason in reasons),
        Figure(name="recomputed prompts", of=lambda one: one.rebuilt, show=percent),
        Figure(name="fallback", of=lambda one: one.fallback, show=percent),
        Figure(name="H20 hours per 1,000", of=lambda one: one.cost),
        *(_lost(what) for what in KINDS),
        *(Figure(name=name, of=partial(_of_faults, of), show=show) for name, of, show in _COSTS),
    ]


def _share(whole: str, part: str, of: Callable[[Outlook], Mapping[str, float]]) -> Figure:
    return Figure(name=f"{whole}: {words(part)}", of=lambda one: of(one).get(part, 0.0), show=percent)


def _lost(what: str) -> Figure:
    return Figure(name=f"lost: {KINDS[what][1]}", of=partial(_of_faults, lambda faults: faults.happened.get(what, 0)))


_COSTS: tuple[tuple[str, Callable[[FaultFigures], float], Callable[[float], str]], ...] = (
    ("engine time lost", lambda faults: faults.engines_down, percent),
    ("trainer lost for", lambda faults: faults.trainer_down_s, duration),
    ("trajectories moved", lambda faults: faults.moved, amount),
    ("attempts ended by faults", lambda faults: faults.again, amount),
    ("tokens wasted by faults", lambda faults: faults.wasted, percent),
)
"""What faults cost in the whole run: name, figure, how it is shown."""


def _of_faults(of: Callable[[FaultFigures], float], one: Outlook) -> float:
    return 0.0 if one.faults is None else of(one.faults)


def _used(pool: str) -> Figure:
    """Of the pool's engines; how much of its time a trainer trains is a line of its own, `trainer: training`."""

    def of(one: Outlook) -> float | None:
        return one.pools[pool].utilisation if pool in one.pools else None

    return Figure(name=f"utilisation of {pool}", of=of, show=percent)


def compared(runs: Mapping[str, Sequence[Outlook]]) -> str:
    """A column for each schedule, the mean over its repeats with their standard deviation; ratios are to the first."""
    first = next(iter(runs.values()))
    base = _mean([one.trajectories_per_s for one in first])
    rows = []
    for figure in figures(one for found in runs.values() for one in found):
        values = [_values(figure, found) for found in runs.values()]
        if any(value >= NEARLY_NONE for found in values for value in found):
            rows.append([figure.name, *(_cell(figure, found) for found in values)])
        if figure.name == "trajectories/s" and base:
            ratios = [_mean([one.trajectories_per_s for one in found]) / base for found in runs.values()]
            rows.append(["  ratio to the first", *(f"{ratio:.2f}" for ratio in ratios)])
    return table(rows, head=["simulated", *runs], right=range(1, len(runs) + 1))


def _values(figure: Figure, found: Iterable[Outlook]) -> list[float]:
    return [value for value in map(figure.of, found) if value is not None]


def _cell(figure: Figure, values: Sequence[float]) -> str:
    if not values:
        return NONE
    spread = f" ± {figure.show(statistics.stdev(values))}" if len(values) > 1 else ""
    return figure.show(_mean(values)) + spread


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def against(predicted: Outlook, measured: Outlook) -> str:
    """Prediction, measurement and error: relative for amounts, in points for shares."""
    rows = []
    for figure in figures((predicted, measured)):
        one, other = figure.of(predicted), figure.of(measured)
        if one is None or other is None or not (one or other):
            continue
        if figure.show is percent:
            error = f"{100 * (one - other):+.1f} points"
        else:
            error = f"{100 * (one / other - 1):+.1f} %" if other else NONE
        rows.append([figure.name, figure.show(one), figure.show(other), error])
    return table(rows, head=["", "simulated", "measured", "error"], right=(1, 2, 3))
