"""What `rollart envs` prints: kinds, what they offer, and what came of playing one."""

from __future__ import annotations

import math
import statistics
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rollart.cli.tables import amount, duration, table
from rollart.config.schema import TaskConfig
from rollart.config.text import scalar_text

if TYPE_CHECKING:
    from rollart.runtime.envs.trial import Episode, Trial

WIDTH = 118
"""Of wrapped lists of names."""
SHOWN = 12
"""Names that are printed of those that cannot be used; all are in the JSON."""


def kinds(rows: Sequence[Mapping[str, Any]], *, whole: bool = False) -> str:
    """A block per kind: what it is, whether it can be used, its fields; `whole`: all that is said of them."""
    blocks = []
    for row in rows:
        state = "installed" if row["installed"] else f"not installed; run: {row['install']}"
        fields = [(_setting(field), field["what"] if whole else _first(field["what"])) for field in row["fields"]]
        blocks.append(f"{row['kind']}  ({state})\n  {row['what']}.\n{table(fields, indent='    ')}")
    more = "one kind with all names that it offers: rollart envs list KIND; play it: rollart envs try KIND key=value"
    return "\n\n".join([*blocks, *([] if whole else [more])]) + "\n"


def _first(text: str) -> str:
    """The first sentence, without a full stop."""
    return text.split(". ", maxsplit=1)[0].rstrip(".")


def _setting(field: Mapping[str, Any]) -> str:
    if field["required"]:
        return f"{field['name']} (required)"
    choices = f" ({'|'.join(field['choices'])})" if field["choices"] else ""
    default = field["default"]
    return f"{field['name']}={scalar_text(list(default) if isinstance(default, tuple) else default)}{choices}"


def offered(found: Mapping[str, Any]) -> str:
    """Names that can be used, then the others by reason."""
    names: Mapping[str, str | None] = found["names"]
    if not names:
        return kinds([found], whole=True)
    by_reason: dict[str | None, list[str]] = {None: []}
    for name, reason in names.items():
        by_reason.setdefault(reason, []).append(name)
    blocks = [f"{len(by_reason[None])} that can be used here, as {found['key']}=NAME:\n{_wrapped(by_reason.pop(None))}"]
    blocks += [
        f"{len(some)} not, because {why}:\n{_wrapped([*some[:SHOWN], *(['..'] if len(some) > SHOWN else [])])}"
        for why, some in by_reason.items()
    ]
    return "\n\n".join([kinds([found], whole=True).strip(), *blocks]) + "\n"


def _wrapped(names: Sequence[str]) -> str:
    return textwrap.fill(", ".join(names), WIDTH, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)


def told(name: str, task: TaskConfig, trial: Trial) -> str:
    """The first episode, figures over all, what is wrong."""
    data = as_data(name, task, trial)
    blocks = [_transcript(trial.episodes[0]), _figures(data), _metrics(data)]
    blocks.append("\n".join(f"note: {text}" for text in data["notes"]))
    problems = data["problems"]
    blocks.append(
        "\n".join([f"{len(problems)} problem(s):", *(f"  {text}" for text in problems.values())])
        if problems
        else "no problems"
    )
    return "\n\n".join(block for block in blocks if block) + "\n"


def _transcript(episode: Episode) -> str:
    lines = [f"--- episode of seed {episode.seed} ({len(episode.turns[1:])} turns, {episode.end}) ---"]
    for turn in episode.turns:
        if turn.action is not None:
            marks = [f"reward {amount(turn.reward)}"] * (turn.reward != 0) + ["bad action"] * turn.bad_action
            lines.append(f"> {turn.action}" + (f"    [{', '.join(marks)}]" if marks else ""))
        lines.append(turn.text.removesuffix("\n"))
    return "\n".join(lines)


def _figures(data: Mapping[str, Any]) -> str:
    ends = ", ".join(f"{count} {end}" for end, count in data["ends"].items())
    rows = [("episodes", f"{data['episodes']}", ends)]
    for what in ("reward", "turns"):
        of = data[what]
        if of:
            rows.append(
                (what, amount(of["mean"]), f"mean; {amount(of['min'])} to {amount(of['max'])}, sd {amount(of['sd'])}")
            )
    if data["success"] is not None:
        rows.append(
            ("success", amount(data["success"]), f"share with a reward of at least {amount(data['success_at'])}")
        )
    rows.append(("bad actions", amount(data["bad_actions"]), "share of all actions"))
    rows += [
        (f"a {what}", duration(of["mean"]), f"mean of {of['n']}; at most {duration(of['max'])}")
        for what, of in data["seconds"].items()
    ]
    return table(rows, right=(1,))


def _metrics(data: Mapping[str, Any]) -> str:
    rows = [
        (name, f"{of['episodes']}", *(amount(of[key]) for key in ("mean", "min", "max")))
        for name, of in data["metrics"].items()
    ]
    return table(rows, head=("metric", "episodes", "mean", "min", "max"), right=(1, 2, 3, 4)) if rows else "no metrics"


def as_data(name: str, task: TaskConfig, trial: Trial) -> dict[str, Any]:
    """The same as plain values."""
    played = [episode for episode in trial.episodes if episode.reward is not None]
    rewards = [episode.reward for episode in played if episode.reward is not None]
    turns = [turn for episode in trial.episodes for turn in episode.turns[1:]]
    names = dict.fromkeys(metric for episode in trial.episodes for metric in episode.metrics)
    first = trial.episodes[0]
    return {
        "what": name,
        "env": task.env.model_dump(mode="json"),
        "episodes": len(trial.episodes),
        "ends": dict(Counter(episode.end for episode in trial.episodes)),
        "reward": _moments(rewards),
        "success_at": task.success_at,
        "success": sum(reward >= task.success_at for reward in rewards) / len(rewards) if rewards else None,
        "turns": _moments([float(len(episode.turns) - 1) for episode in played]),
        "bad_actions": sum(turn.bad_action for turn in turns) / len(turns) if turns else 0.0,
        "seconds": {what: _moments(times) | {"n": len(times)} for what, times in trial.seconds.items()},
        "metrics": {metric: _metric(metric, trial.episodes) for metric in names},
        "notes": list(trial.notes),
        "problems": dict(trial.problems),
        "first": {
            "seed": first.seed,
            "end": first.end,
            "turns": [
                {"action": turn.action, "text": turn.text, "reward": turn.reward, "bad_action": turn.bad_action}
                for turn in first.turns
            ],
        },
    }


def _metric(name: str, episodes: Sequence[Episode]) -> dict[str, float]:
    values = [episode.metrics[name] for episode in episodes if math.isfinite(episode.metrics.get(name, math.nan))]
    return _moments(values or [0.0]) | {"episodes": len(values)}


def _moments(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    return {
        "mean": statistics.fmean(values), "sd": statistics.pstdev(values), "min": min(values), "max": max(values),
    }  # fmt: skip
