"""`docs/metrics.md` from the tables in the code, so that the page cannot say something else."""

from __future__ import annotations

from rollart.observe.metric_names import METRICS
from rollart.observe.summary_fields import FIELDS

OPENING = """\
# Metrics

Generated from the code; to change it, change the tables there and run

    python -m rollart.observe.metrics --table > docs/metrics.md

Everything on this page is computed from `events.jsonl`, live and afterwards by the same fold.

## metrics.jsonl

One JSON object per line: `"train/step"` and then `"<area>/<task|all>/<name>/<stat>": number`. A row is written when a step
is finished, when an evaluation ends, and for baselines and the warm start. `train/step` is the number of steps finished
by then: 0 before training, n + 1 for the event `step_finished` with `step` n. "Since the row before" means since the step
before was finished. A quantity that did not occur has no key: a missing count is 0. `all` is over the
trajectories of all tasks, so each trajectory weighs the same; over tasks for evaluations. A name in braces stands for any
name of that kind. *stats*: mean, std (population), min, max, sum, count, per_s, value (the number itself).

| key | stats | unit | meaning |
|---|---|---|---|
"""
SUMMARY = """
## summary.json

| field | meaning |
|---|---|
"""
SCOPES = {"both": "<task|all>", "task": "<task>", "all": "all"}


def table() -> str:
    """The whole page."""
    lines = [
        f"| `{metric.area}/{SCOPES[metric.scope]}/{metric.name}`".replace("|all>", "\\|all>")
        + f" | {' '.join(metric.stats)} | {metric.unit} | {metric.meaning} |\n"
        for metric in METRICS
    ]
    fields = [f"| {', '.join(f'`{name}`' for name in key.split(', '))} | {text} |\n" for key, text in FIELDS.items()]
    return OPENING + "".join(lines) + SUMMARY + "".join(fields)
