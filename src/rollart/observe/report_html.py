"""The parts of the report that need no script: facts, results, advice, waits and the token ledger, as HTML.

Invariant: every text from a run is escaped; a figure that the events do not give is a dash, never a zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from rollart.core.types import DROP_REASONS, DropReason
from rollart.observe.interruptions import told
from rollart.observe.report_data import Report
from rollart.observe.tally import wilson

COLUMNS = (
    ("random", "random actions"),
    ("constant", "best constant answer"),
    ("warm", "after warm start"),
    ("after", "after RL"),
    ("held_back", "held-back instances"),
    ("greedy", "after RL, greedy"),
)
CHARACTER = 0.62
"""Per cent of the page's width that a character of a phase's name needs; too long a name is said when pointed at."""
MAX_INTERRUPTIONS = 12
"""Listed one by one."""
FEW = 10
"""Episodes below which no interval is drawn: a policy without chance on one instance needs one episode."""
DASH = '<span class="dash">–</span>'


def number(value: float | None, digits: int = 3) -> str:
    """Short, with thousands separated."""
    if value is None:
        return DASH
    if abs(value) >= 1000 or float(value).is_integer():
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def percent(share: float | None) -> str:
    if share is None:
        return DASH
    return f"{100 * share:.1f}\u00a0%" if share < 0.1 else f"{100 * share:.0f}\u00a0%"


def seconds(value: float | None) -> str:
    if value is None:
        return DASH
    if value >= 100:
        return f"{int(value) // 60}\u00a0min {int(value) % 60:02d}\u00a0s"
    return f"{value:.3g}\u00a0s" if value >= 1 or value == 0 else f"{1000 * value:.3g}\u00a0ms"


def opening(report: Report) -> str:
    """Name, status and the figures of the run."""
    summary, started, header = report.summary, report.started, report.header
    status = str(summary["status"])
    kind = {"done": "good", "failed": "bad"}.get(status, "warn")
    facts = [
        f"recipe {started.get('recipe')}" if started else "",
        f"world {header.get('world')}",
        f"batch {started.get('batch')} in groups of {started.get('group_size')}" if started else "",
        f"max staleness {started.get('max_staleness')}, sync order {started.get('sync_order')}" if started else "",
        f"git {header.get('git')}",
    ]
    virtual = summary["figures"] == "simulated"
    eyebrow = "rollart · simulated run" if virtual else "rollart run"
    simulated = '<span class="pill warn">simulated</span>' if virtual else ""
    why = f'<p class="why">{escape(str(summary["why"]))}</p>' if kind != "good" else ""
    return (
        f'<header class="top"><div><p class="eyebrow">{eyebrow}</p><h1>{escape(str(header.get("run")))}'
        f'{simulated}<span class="pill {kind}">{escape(status)}</span></h1>'
        f'<p class="facts">{" <i>·</i> ".join(escape(fact) for fact in facts if fact)}</p>{why}</div>'
        '<button id="theme" type="button" title="light or dark">◐</button></header>'
        f'<section class="tiles">{"".join(_tiles(report))}</section>'
    )


def _tiles(report: Report) -> Iterable[str]:
    summary = report.summary
    tokens, staleness = summary["tokens"], summary["staleness"]
    rate = summary["throughput"]["trajectories_per_s"]
    wanted = report.started.get("steps")
    trained = f"{percent(tokens['trained'] / tokens['sampled'])} trained" if tokens and tokens["sampled"] else ""
    bound = f"bound {number(staleness['bound'])}{'' if staleness['holds'] else ' does not hold'}"
    spread = f"{number(staleness['max'])} at most, {bound}"
    rows = (
        ("steps", number(summary["steps"]), f"of {number(wanted)}" if wanted else ""),
        ("wall time", seconds(summary["wall_s"]), f"{seconds(summary['window_s'])} in training steps"),
        ("trained trajectories", number(summary["trajectories"]), f"{number(rate)} per second" if rate else ""),
        ("sampled tokens", number(tokens["sampled"] if tokens else None), trained),
        ("mean staleness", number(staleness["mean"], 2), spread),
        ("engine idle", percent(summary["engine_idle_frac"]), "without a live request"),
        ("trainer idle", percent(summary["trainer_idle_frac"]), "neither training nor publishing"),
        ("exposed sync", seconds(summary["sync_exposed_s"]), "engines stopped by an apply"),
    )
    for name, value, note in rows:
        yield (
            f'<div class="tile"><p class="name">{name}</p><p class="value">{value}</p><p class="note">{note}</p>'
            f'<p class="kind">{summary["figures"]}</p></div>'
        )


def section(ident: str, title: str, note: str, body: str) -> str:
    if not body:
        return ""
    return f'<section id="{ident}"><div class="head"><h2>{title}</h2><p>{note}</p></div>{body}</section>'


def results(report: Report) -> str:
    """Success per task: from random actions to the trained policy."""
    summary = report.summary
    if not any(share is not None for cells in summary["success"].values() for share in cells.values()):
        return ""
    heads = "".join(f"<th>{name}</th>" for _, name in COLUMNS)
    lines = []
    for index, task in enumerate(report.tasks):
        cells = "".join(_success_cell(summary, task, column, index) for column, _ in COLUMNS)
        lines.append(f'<tr><th><i class="dot t{index % 6}"></i>{escape(task)}</th>{cells}</tr>')
    table = (
        f'<div class="card scroll"><table class="success"><thead><tr><th></th>{heads}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )
    note = f"{summary['figures']} share of successful episodes; whisker: 95 % interval (Wilson) for n episodes"
    return section("results", "What was learned", note, table)


def _success_cell(summary: Mapping[str, Any], task: str, column: str, index: int) -> str:
    share, n = summary["success"][task][column], summary["success_episodes"][task][column]
    if share is None:
        return f'<td class="{column}">{DASH}</td>'
    low, high = wilson(share, n)
    whisker = f'<u style="left:{100 * low:.1f}%;width:{100 * (high - low):.1f}%"></u>' if n >= FEW else ""
    answer = summary["constant_answer"][task] if column == "constant" else None
    said = f' <span class="answer">“{escape(str(answer))}”</span>' if answer else ""
    return (
        f'<td class="{column}"><b>{share:.3f}</b><span class="bar">'
        f'<i class="t{index % 6}" style="width:{100 * share:.1f}%"></i>{whisker}</span>'
        f"<small>n = {number(n)}{said}</small></td>"
    )


def advice(report: Report) -> str:
    """What stands out."""
    items = [f'<li class="{item.severity}"><p>{escape(item.text)}</p></li>' for item in report.advice]
    items += [f'<li class="note"><p>{escape(text)}</p></li>' for text in report.said]
    if not items:
        items = ['<li class="good"><p>Nothing stands out: no part starves, waits or wastes beyond the usual.</p></li>']
    return section("advice", "What stands out", "computed from the events", f'<ul class="advice">{"".join(items)}</ul>')


def interruptions(report: Report) -> str:
    """What was lost on the way and when the run went on; nothing where nothing was."""
    found = report.interruptions
    items = [f'<li class="note"><p>{escape(text)}</p></li>' for text in found[:MAX_INTERRUPTIONS]]
    if len(found) > MAX_INTERRUPTIONS:
        items.append(f'<li class="note"><p>{len(found) - MAX_INTERRUPTIONS} more; the event log has them all</p></li>')
    said = "; ".join(told(report.summary["interruptions"]))
    note = f"{report.summary['figures']}; seconds since the run began" + (f"; {escape(said)}" if said else "")
    return section("interruptions", "Interruptions", note, f'<ul class="advice">{"".join(items)}</ul>' if items else "")


def phases(report: Report) -> str:
    """The whole run as one bar."""
    wall_s = report.summary["wall_s"]
    if not report.phases or not wall_s:
        return ""
    parts = []
    for name, start, end in report.phases:
        left, width = 100 * start / wall_s, 100 * (end - start) / wall_s
        kind = "train" if name == "training" else "eval" if name.startswith("evaluation") else "warm"
        said = f"{escape(name)} {seconds(end - start)}"
        label = f"<span>{said}</span>" if width >= CHARACTER * len(said) + 1.5 else ""
        style = f"left:{left:.2f}%;width:{width:.2f}%"
        parts.append(f'<div class="{kind}" style="{style}" title="{said}">{label}</div>')
    return f'<div class="phases">{"".join(parts)}</div>'


def stacked(parts: Sequence[tuple[str, str, float]], unit: str) -> str:
    """One bar of (css class, name, amount), with a legend that gives share and amount; unit %: share alone."""
    total = sum(amount for *_, amount in parts)
    if total <= 0:
        return ""

    def show(amount: float) -> str:
        return seconds(amount) if unit == "s" else "" if unit == "%" else number(amount)

    bars = "".join(
        f'<i class="{kind}" style="width:{100 * amount / total:.3f}%" title="{escape(name)}: {show(amount)}"></i>'
        for kind, name, amount in parts
    )
    keys = "".join(
        f'<li><i class="dot {kind}"></i>{escape(name)} <b>{percent(amount / total)}</b> <small>{show(amount)}</small></li>'
        for kind, name, amount in parts
        if amount > 0
    )
    return f'<div class="stack">{bars}</div><ul class="keys">{keys}</ul>'


def waits(report: Report) -> str:
    """What waited for what."""
    spent = report.summary["waits"]
    names = (
        ("Trainer", "trainer", (("w-work", "train"), ("w-move", "publish"), ("w-wait", "wait_for_batch"), ("w-rest", "other"))),
        ("Engines", "engines", (("w-work", "generate"), ("w-move", "stopped_by_apply"), ("w-wait", "no_request"))),
    )  # fmt: skip
    rows = []
    for title, key, parts in names:
        bar = stacked([(kind, part.replace("_", " "), spent[key].get(part, 0.0)) for kind, part in parts], "s")
        if bar:
            rows.append(f'<div class="wait"><h3>{title}</h3><div>{bar}</div></div>')
    phases_of = (
        ("w-move", "env_open"), ("w-wait", "wait_for_engine"), ("w-work", "generate"), ("w-env", "env_step"),
        ("w-score", "score"), ("w-rest", "other"),
    )  # fmt: skip
    for task, parts in spent["trajectory"].items():
        bar = stacked([(kind, name.replace("_", " "), parts.get(name, 0.0)) for kind, name in phases_of], "s")
        if bar:
            rows.append(f'<div class="wait"><h3>A {escape(task)} trajectory</h3><div>{bar}</div></div>')
    note = f"{report.summary['figures']}; trainer and engines: from the start of the first step to the end of the last"
    return section("waits", "What waited for what", note, f'<div class="card">{"".join(rows)}</div>' if rows else "")


def ledger(report: Report) -> str:
    """Where every sampled token and every trajectory went."""
    tokens, by = report.summary["tokens"], report.summary["trajectories_by"]
    bars, note = [], ""
    if tokens and tokens["sampled"]:
        parts = _fates(tokens["trained"], tokens["dropped"])
        parts += [(f"l-{name}", name.replace("_", " "), tokens[name]) for name in ("buffered", "in_flight", "eval")]
        total = sum(n for *_, n in parts)
        verdict = (
            "the ledger closes" if total == tokens["sampled"] else f"it does not close: {number(total)} accounted for"
        )
        note = f"{report.summary['figures']}; {number(tokens['sampled'])} tokens sampled; {verdict}"
        bars.append(("Tokens", stacked(parts, "tokens")))
    bars.append(("Training trajectories", stacked(_fates(by["trained"], by["dropped"]), "trajectories")))
    body = "".join(f'<div class="wait"><h3>{title}</h3><div>{bar}</div></div>' for title, bar in bars if bar)
    if by["failed"]:
        failed = ", ".join(f"<b>{number(n)}</b> {escape(kind)}" for kind, n in by["failed"].items())
        why = "an attempt that fails is retried, replaced or dropped; it never counts as a reward of 0"
        body += f'<div class="wait"><h3>Failed attempts</h3><div>{failed} <small>{why}</small></div></div>'
    return section("ledger", "Where everything went", note, f'<div class="card">{body}</div>' if body else "")


def _fates(trained: int, dropped: Mapping[DropReason, int]) -> list[tuple[str, str, float]]:
    colour = {reason: f"l-drop{index % 5}" for index, reason in enumerate(DROP_REASONS)}
    drops = [(colour[reason], f"dropped: {reason}", float(n)) for reason, n in sorted(dropped.items())]
    return [("l-trained", "trained", float(trained)), *drops]
