"""What a configuration comes to: prompts, groups, trajectories and tokens per batch, sizes per rank, the window, the mix.

Invariant: each figure follows from the configuration alone; what only a run can tell (tokens really sampled, seconds) is
an upper bound here and says so. Why: the products of several settings are what surprises, not the settings.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rollart.config.load import Resolved
from rollart.config.placement import Placement, placements
from rollart.config.schema import (
    CharsTokenizer,
    ModelledEngine,
    Retry,
    RunConfig,
    Schedule,
    ScratchModel,
    ShapeModel,
)
from rollart.config.text import scalar_text
from rollart.perf.engines import engine_facts

FP32_BYTES = 4
"""Bytes per parameter: weights are trained and published in fp32."""
VALUE_COLUMNS = 48
"""Longest value that is printed whole beside its origin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSizes:
    """A task's part of what is trained, when it has exactly its share; over `schedule.mix_window` steps it has."""

    share: float
    """Of the trained trajectories; the shares of all tasks sum to 1."""
    groups_per_batch: float
    trajectories_per_batch: float
    trajectories_per_step: float
    tokens_per_trajectory: int
    """Sampled, at most: every turn taken and every turn full, as far as the context reaches."""
    instances: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The numbers that follow from a configuration. A step is one optimiser step, a batch is what is released together."""

    batches: int
    prompts_per_batch: int
    """Task instances; one per group."""
    trajectories_per_batch: int
    sampled_tokens_per_batch: int
    """At most, when every task has exactly its share."""
    most_tokens_per_batch: int
    """At most, whatever the tasks of the batch are."""
    steps_per_batch: int
    groups_per_step: int
    """Every optimiser step has equally many whole groups."""
    trajectories_per_step: int
    most_tokens_per_step: int
    trajectories_per_rank_step: int
    """Of the fullest rank; the others have one less at most."""
    groups_window: int
    """Groups open, buffered or in training at once."""
    trajectories_window: int
    """With redundant members and groups."""
    parameters: int | None
    """None where only the weights' folder can tell."""
    buckets: int | None
    tasks: Mapping[str, TaskSizes]

    @property
    def mix(self) -> dict[str, float]:
        """Share of what is trained, per task; sums to 1."""
        return {name: task.share for name, task in self.tasks.items()}


def mix_of(config: RunConfig) -> dict[str, float]:
    """The resolved mix: each task's share of the trained trajectories."""
    total = sum(task.ratio for task in config.tasks.values())
    return {name: task.ratio / total for name, task in config.tasks.items()}


def parameters_of(model: ScratchModel, vocabulary: int) -> int:
    """Parameters of a model made from scratch, as transformers counts them for the family."""
    head = model.hidden // model.heads
    kv = model.kv_heads * head
    attention = 2 * model.hidden * model.hidden + 2 * model.hidden * kv
    if model.family == "qwen2":
        attention += model.hidden + 2 * kv  # biases of query, key and value
    if model.family == "qwen3":
        attention += 2 * head  # norms of query and key
    layer = attention + 3 * model.hidden * model.ffn + 2 * model.hidden
    embeddings = vocabulary * model.hidden * (1 if model.tie_embeddings else 2)
    return embeddings + model.layers * layer + model.hidden


def task_sizes(config: RunConfig) -> dict[str, TaskSizes]:
    """What each task comes to in a batch."""
    schedule, shares = config.schedule, mix_of(config)
    context = None
    if isinstance(config.model, ScratchModel):
        context = config.model.max_positions
    elif isinstance(config.model, ShapeModel):
        context = config.model.max_context
    return {
        name: TaskSizes(
            share=shares[name],
            groups_per_batch=shares[name] * schedule.groups_per_batch,
            trajectories_per_batch=shares[name] * schedule.batch,
            trajectories_per_step=shares[name] * schedule.batch / schedule.steps_per_batch,
            tokens_per_trajectory=min(task.max_turns * task.max_tokens, context or task.max_turns * task.max_tokens),
            instances=task.size,
        )
        for name, task in config.tasks.items()
    }


def sizes(config: RunConfig) -> Sizes:
    """Work the numbers out."""
    schedule, tasks = config.schedule, task_sizes(config)
    longest = max(task.tokens_per_trajectory for task in tasks.values())
    parameters = None
    if isinstance(config.model, ScratchModel) and isinstance(config.tokenizer, CharsTokenizer):
        parameters = parameters_of(config.model, len(config.tokenizer.alphabet) + 1)  # and the padding token
    per_step = schedule.batch // schedule.steps_per_batch
    window = schedule.groups_window
    return Sizes(
        batches=schedule.steps,
        prompts_per_batch=schedule.groups_per_batch,
        trajectories_per_batch=schedule.batch,
        sampled_tokens_per_batch=round(
            sum(task.trajectories_per_batch * task.tokens_per_trajectory for task in tasks.values())
        ),
        most_tokens_per_batch=schedule.batch * longest,
        steps_per_batch=schedule.steps_per_batch,
        groups_per_step=schedule.groups_per_batch // schedule.steps_per_batch,
        trajectories_per_step=per_step,
        most_tokens_per_step=per_step * longest,
        trajectories_per_rank_step=math.ceil(per_step / config.trainer.ranks),
        groups_window=window,
        trajectories_window=window * (schedule.group_size + schedule.redundancy),
        parameters=parameters,
        buckets=None if parameters is None else math.ceil(parameters * FP32_BYTES / config.trainer.bucket_bytes),
        tasks=tasks,
    )


def schedule_in_words(schedule: Schedule) -> str:
    """What the staleness bound and the order of a sync mean, with RollArt's alpha (design: the table of staleness)."""
    if schedule.max_staleness == 0:
        return "synchronous: a batch is sampled under the weights that it trains"
    if schedule.sync_order == "paper":
        alpha = schedule.max_staleness - 1
        what = "a one-off pipeline" if alpha == 0 else f"engines' age at most {alpha}"
        return f"RollArt's order, alpha {alpha}: {what}"
    return f"weights applied as soon as engines hold them; RollArt's alpha {schedule.max_staleness}"


def rules_in_words(schedule: Schedule) -> list[tuple[str, str, str]]:
    """What else a schedule asks for that is not what an asynchronous run does by itself."""
    rows: list[tuple[str, str, str]] = []
    if schedule.enforce == "admission":
        rows.append(
            ("enforce", "admission", "staleness is looked at when a trajectory starts only, so its bound does not hold")
        )
    if schedule.barrier == "turn":
        rows.append(
            ("barrier", "turn", "the trajectories of a batch take each turn together; the slowest is waited for")
        )
    if schedule.score == "batch":
        rows.append(("score", "batch", "rewards are asked for when the last trajectory of a batch has ended"))
    if schedule.colocated:
        rows.append(("colocated", "true", "rollout and training take turns on the same devices and never overlap"))
    return rows


def explain(resolved: Resolved) -> str:
    """All figures, advisories, and every value with its origin, as text."""
    config = resolved.config
    found = sizes(config)
    blocks = [
        f"{config.name}, from {resolved.source}",
        _table(_per_batch(config, found)),
        _tasks(found),
        "\n".join(f"note: {line}" for line in advisories(config)),
        _values(resolved),
    ]
    return "\n\n".join(block for block in blocks if block) + "\n"


def as_data(resolved: Resolved) -> dict[str, Any]:
    """The same as plain values, for machines."""
    values = resolved.config.model_dump(mode="json")
    return {
        "name": resolved.config.name,
        "source": resolved.source,
        "sizes": asdict(sizes(resolved.config)),
        "notes": advisories(resolved.config),
        "values": {
            dotted: {"value": _at(values, dotted), "origin": str(origin)} for dotted, origin in resolved.origins.items()
        },
    }


def _tasks(found: Sizes) -> str:
    """The resolved mix: what is expected of each task, over many batches."""
    head = ("task", "mix", "groups", "trajectories", "per optimizer step", "tokens of one, at most", "instances")
    rows = [
        (
            name, f"{100 * task.share:.1f} %", f"{task.groups_per_batch:.4g}", f"{task.trajectories_per_batch:.4g}",
            f"{task.trajectories_per_step:.4g}", f"{task.tokens_per_trajectory}", f"{task.instances}",
        )
        for name, task in found.tasks.items()
    ]  # fmt: skip
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    lines = [
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in (head, *rows)
    ]
    return "\n".join(["the resolved mix; groups and trajectories are expected, per batch:", *lines])


def _exactness(config: RunConfig) -> str:
    """When a batch has fewer trajectories than it should."""
    decision = config.failure.on_failure
    if "drop" in (decision.kind, decision.then if isinstance(decision, Retry) else ""):
        return f"fewer only where members fail for good; a group keeps {config.failure.min_group_size} at least"
    return "always"


def _workers(config: RunConfig, found: Sizes) -> list[tuple[str, str, str]]:
    """The trainer and the engines: those of this machine, or those that are placed on the pools of a cluster."""
    engine, ranks = config.engine, config.trainer.ranks
    if not config.cluster.pools:
        return [
            (
                "ranks",
                f"{ranks}",
                f"{found.trajectories_per_rank_step} trajectories per rank and optimizer step, at most",
            ),
            ("tokens per rank at once", f"{config.trainer.micro_batch_tokens}", "padded, in one micro-batch"),
            ("engines", f"{engine.count}", f"{live_of(config)} requests at once each"),
        ]
    trainer, *engines = placements(config)
    rows = [("trainer", f"{trainer.devices}", f"devices {_of_pool(config, trainer)}")]
    for place, count in Counter(engines).items():
        degrees = " x ".join(f"{name} {n}" for name, n in place.degrees._asdict().items() if n > 1) or "tp 1"
        each = f"{place.role}, of {place.devices} devices ({degrees}), {live_of(config)} requests at once each"
        rows.append(("engines", f"{count}", f"{_of_pool(config, place)}: {each}"))
    return rows


def _of_pool(config: RunConfig, place: Placement) -> str:
    return f"of pool {place.pool} ({config.cluster.pools[place.pool].device})"


def live_of(config: RunConfig) -> int:
    """Requests that one engine takes at once."""
    engine = config.engine
    if isinstance(engine, ModelledEngine):
        return engine.max_live or engine_facts(engine.name, engine.version).max_sequences
    return engine.max_live


def _per_batch(config: RunConfig, found: Sizes) -> list[tuple[str, str, str]]:
    schedule = config.schedule
    rows = [
        ("batches", f"{found.batches}", "each trained, then published as one version"),
        ("prompts per batch", f"{found.prompts_per_batch}", "task instances, one group each"),
        ("groups per batch", f"{found.prompts_per_batch}", f"of {schedule.group_size} trajectories"),
        ("trajectories per batch", f"{found.trajectories_per_batch}", _exactness(config)),
        (
            "tokens per batch",
            f"{found.most_tokens_per_batch}",
            "sampled, at most: every trajectory as long as the longest may be",
        ),
        (
            "tokens in this mix",
            f"{found.sampled_tokens_per_batch}",
            "sampled per batch, at most, with each task at its share",
        ),
        (
            "optimizer steps per batch",
            f"{found.steps_per_batch}",
            f"{found.groups_per_step} groups, {found.trajectories_per_step} trajectories, at most "
            f"{found.most_tokens_per_step} sampled tokens each",
        ),
        ("prompts in all", f"{found.batches * found.prompts_per_batch}", ""),
        ("trajectories in all", f"{found.batches * found.trajectories_per_batch}", ""),
    ]
    if found.parameters is not None:
        share = math.ceil(found.parameters / config.trainer.ranks)
        rows.append(("parameters", f"{found.parameters}", f"{share} per rank; published in {found.buckets} bucket(s)"))
    rows += [
        ("staleness", f"at most {schedule.max_staleness}", schedule_in_words(schedule)),
        *rules_in_words(schedule),
        ("window of groups", f"{found.groups_window}", "open, buffered or in training at once"),
        ("trajectories at once", f"{found.trajectories_window}", "at most, redundant ones included"),
        *_workers(config, found),
        ("env hosts", f"{config.envs.hosts}", f"{config.envs.sessions_per_host} sessions each"),
    ]
    return rows


def advisories(config: RunConfig) -> list[str]:
    """Settings that are allowed and may surprise, a line each."""
    found = sizes(config)
    lines: list[str] = []
    engines = len(placements(config)) - 1
    live = engines * live_of(config)
    if found.trajectories_window > live:
        what = "the engines of cluster.pools take" if config.cluster.pools else "engine.count x engine.max_live is"
        lines.append(
            f"{found.trajectories_window} trajectories may want a turn at once, but {what} {live}; the rest queues"
        )
    for name, task in config.tasks.items():
        if found.mix[name] * found.prompts_per_batch * config.schedule.mix_window < 1:
            lines.append(
                f"tasks.{name}: its share is below one group per schedule.mix_window; it may be missing in a window"
            )
        if task.held_out == 0 and config.eval.episodes and task.size > 1:
            lines.append(f"tasks.{name}: no instance is held back; evaluation scores instances that were trained on")
    lines += _algorithm_notes(config)
    if config.optimizer.lr == 0:
        lines.append("optimizer.lr=0: nothing is learned")
    return lines


def _algorithm_notes(config: RunConfig) -> Iterator[str]:
    """Settings of what is learned that do less together, or something else, than each of them says."""
    algorithm = config.algorithm
    if algorithm.zero_variance == "drop":
        yield (
            "algorithm.zero_variance=drop: groups with equal rewards are dropped and others opened, so more is sampled than "
            "is trained; a batch that waits too long for them is trained with fewer"
        )
        if not algorithm.compares_members:
            yield (
                "algorithm.zero_variance=drop with algorithm.advantage.baseline=batch: groups with equal rewards teach here, "
                "by their distance to the batch's mean; without them that mean is biased; use algorithm.zero_variance=train"
            )
    if algorithm.loss.kind == "gspo" and config.schedule.steps_per_batch == 1:
        yield (
            "algorithm.loss.kind=gspo with schedule.steps_per_batch=1: the only update of a batch is at the weights that its "
            "ratios are taken to, so every ratio is exactly 1 and nothing is clipped; use steps_per_batch of 2 or more"
        )
    if algorithm.advantage.kind == "dr_grpo" and algorithm.loss.normalize != "constant":
        yield (
            f"algorithm.advantage.kind=dr_grpo with algorithm.loss.normalize={algorithm.loss.normalize}: only half of Dr.GRPO: "
            "the loss is still divided by sampled lengths; its other half is algorithm.loss.normalize=constant"
        )


def _table(rows: list[tuple[str, str, str]]) -> str:
    left, middle = (max(len(row[column]) for row in rows) for column in (0, 1))
    return "\n".join(f"{a.ljust(left)}  {b.rjust(middle)}  {c}".rstrip() for a, b, c in rows)


def _values(resolved: Resolved) -> str:
    rows: list[tuple[str, str, str]] = []
    values = resolved.config.model_dump()
    for dotted, origin in resolved.origins.items():
        text = scalar_text(_at(values, dotted))
        rows.append((dotted, text if len(text) <= VALUE_COLUMNS else f"{text[: VALUE_COLUMNS - 3]}...", str(origin)))
    left, middle = (max(len(row[column]) for row in rows) for column in (0, 1))
    lines = [f"{a.ljust(left)}  {b.ljust(middle)}  {c}".rstrip() for a, b, c in rows]
    return "\n".join(["every value and where it comes from:", *lines])


def _at(values: Mapping[str, Any], dotted: str) -> Any:
    at: Any = values
    for part in dotted.split("."):
        at = at[part]
    return at
