"""What a run gives, as the report shows it: step time, throughput, pools, cost; of a simulated run, what that rests on.

Invariant: the same section for measured and simulated runs, each saying which it is; every text from a run is escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape

from rollart.observe.fault_tally import counted
from rollart.observe.outlook import Outlook
from rollart.observe.report_html import DASH, number, percent, seconds, section, stacked

TRAJECTORY = (
    ("w-work", "generation"), ("w-move", "reset"), ("w-env", "env_step"), ("w-score", "reward"), ("l-drop1", "weights"),
    ("w-wait", "waiting"),
)  # fmt: skip
TRAINER = (("w-work", "training"), ("l-drop1", "weights"), ("w-wait", "waiting"), ("w-rest", "other"))


def outlook(found: Outlook | None, figures: str) -> str:
    """Figures between the end of the first step and the end of the last."""
    if found is None:
        return ""
    rows = [f'<div class="wait"><h3>{name}</h3><div>{said}</div></div>' for name, said in _rows(found) if said]
    note = f"{figures}; from the end of the first step to the end of the last ({found.steps} steps)"
    return section("outlook", "What it gives", note, f'<div class="card">{"".join(rows)}</div>{_pools(found)}')


def _rows(found: Outlook) -> Iterable[tuple[str, str]]:
    step = found.step_s
    yield (
        "Time of a step",
        f"<b>{seconds(step.median)}</b> median, {seconds(step.mean)} mean, {seconds(step.p10)} to {seconds(step.p90)} from p10 "
        "to p90",
    )
    yield (
        "Throughput",
        f"<b>{number(found.trajectories_per_s)}</b> trajectories/s, {number(found.tokens_per_s)} tokens/s, of which "
        f"{number(found.sampled_tokens_per_s)} sampled",
    )
    life = "" if found.trajectory_s is None else f" <small>{seconds(found.trajectory_s)}</small>"
    yield f"A trajectory{life}", _bar(TRAJECTORY, found.trajectory)
    yield "The trainer", _bar(TRAINER, found.trainer)
    if not found.bound_holds:
        yield (
            "Staleness",
            f"checked at admission only, so the bound of {number(found.staleness_bound)} does not hold: "
            f"{number(found.staleness_max)} at most",
        )
    if found.faults is not None:
        faults = found.faults
        yield (
            "Lost, whole run",
            f"{escape(faults.lost)}; time without: engines {percent(faults.engines_down)} of theirs, trainer "
            f"{seconds(faults.trainer_down_s)} ({counted(faults.repeated_steps, 'step', 'steps')} repeated), rewards "
            f"{seconds(faults.rewards_down_s)}; {counted(faults.moved, 'trajectory', 'trajectories')} moved, "
            f"{counted(faults.again, 'attempt', 'attempts')} ended, {percent(faults.wasted)} of the tokens wasted",
        )
    if found.cost is not None:
        parts = ", ".join(f"{escape(pool)} {number(cost)}" for pool, cost in found.costs.items())
        yield "Cost of 1,000", f"<b>{number(found.cost)}</b> H20 hours per 1,000 trained trajectories: {parts}"


def _bar(parts: Iterable[tuple[str, str]], shares: Mapping[str, float]) -> str:
    return stacked([(kind, name.replace("_", " "), 100 * shares[name]) for kind, name in parts], "%")


def _pools(found: Outlook) -> str:
    heads = "".join(
        f"<th>{name}</th>" for name in ("pool", "engines", "in use", "live turns each", "turns", "H20 hours")
    )
    lines = [
        f"<tr><th>{escape(name)}</th><td>{number(pool.engines)}</td><td>{percent(pool.utilisation)}</td>"
        f"<td>{number(pool.live)}</td><td>{number(pool.turns)}</td><td>{number(found.costs.get(name))}</td></tr>"
        for name, pool in found.pools.items()
    ]
    if found.trains not in found.pools:
        cost = number(found.costs.get(found.trains))
        lines.append(
            f"<tr><th>{escape(found.trains)}</th><td>trainer</td><td>{percent(found.trainer['training'])}</td>"
            f"<td>{DASH}</td><td>{DASH}</td><td>{cost}</td></tr>"
        )
    return (
        f'<div class="card scroll"><table class="pools"><thead><tr>{heads}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def basis(found: Outlook | None) -> str:
    """What the figures of a simulated run rest on; nothing of a measured one."""
    if found is None or not found.basis:
        return ""
    items = [f'<li class="warn"><p>{escape(line)}</p></li>' for line in found.notes]
    items += [f'<li class="note"><p>{escape(line)}</p></li>' for line in found.basis]
    note = "no device was there: models and calibration"
    return section("basis", "What the figures rest on", note, f'<ul class="advice">{"".join(items)}</ul>')
