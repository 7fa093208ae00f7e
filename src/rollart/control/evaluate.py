"""Evaluation: its own episodes, pinned to one version, outside every group, buffer, mix and staleness.

Invariant: an evaluation either scores all its episodes under one version or says that it is incomplete.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from rollart.control.instances import Split, evaluation, splits
from rollart.control.rollout import Attempt, Rollout
from rollart.control.weights import Weights
from rollart.core.events import Recorder
from rollart.core.seeds import seed_of
from rollart.core.types import Sampling, TaskInstance, TaskSpec, Trajectory, Version
from rollart.sched.timeouts import work_deadline

ATTEMPTS = 3
"""Tries at an episode whose environment or engine failed, before the evaluation counts as incomplete."""

Mode = Literal["sampled", "greedy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """One task's result on one split."""

    task: str
    split: Split
    mode: Mode
    episodes: int
    """Episodes that were scored."""
    success: float
    reward_mean: float
    complete: bool


class Evaluator:
    def __init__(
        self, record: Recorder, rollout: Rollout, weights: Weights, *, sampling: Mapping[str, Sampling], seed: int,
        trajectory_s: float, concurrency: int, keep: Callable[[Trajectory], None],
    ) -> None:  # fmt: skip
        self._record = record
        self._rollout = rollout
        self._weights = weights
        self._sampling = sampling
        self._seed = seed
        self._trajectory_s = trajectory_s
        self._slots = asyncio.Semaphore(concurrency)
        self._keep = keep
        self.ordinal = 0
        """Evaluations of a task on a split so far."""
        self.under_way: tuple[str, Version] | None = None

    async def run(self, name: str, version: Version, *, episodes: int | None, modes: tuple[Mode, ...]) -> list[Score]:
        """Score every task on every split under `version`, `episodes` each (None: every instance once)."""
        tasks = self._rollout.tasks
        self._record("eval_started", eval=name, version=version, tasks=list(tasks))
        self._weights.pin(version)
        self.under_way = (name, version)
        try:
            # task groups and not `gather`, which at shutdown leaves before all that it started have ended
            async with asyncio.TaskGroup() as group:
                scoring = [
                    group.create_task(self._score(name, version, spec, split, mode, episodes))
                    for spec in tasks.values()
                    for split in splits(spec)
                    for mode in modes
                ]
            scores = [task.result() for task in scoring]
        finally:
            self._weights.unpin(version)
            self.under_way = None
        self._record("eval_finished", eval=name, version=version, complete=all(score.complete for score in scores))
        return scores

    async def _score(
        self, name: str, version: Version, spec: TaskSpec, split: Split, mode: Mode, episodes: int | None
    ) -> Score:
        self.ordinal += 1
        wanted = evaluation(spec, split, ordinal=self.ordinal, episodes=episodes)
        async with asyncio.TaskGroup() as group:
            ended = [group.create_task(self._episode(instance, member, version, mode)) for instance, member in wanted]
        rewards = [reward for task in ended if (reward := task.result().reward) is not None]
        n = max(1, len(rewards))
        score = Score(
            task=spec.name, split=split, mode=mode, episodes=len(rewards),
            success=sum(reward >= spec.success_at for reward in rewards) / n, reward_mean=sum(rewards) / n,
            complete=len(rewards) == len(wanted),
        )  # fmt: skip
        self._record(
            "eval_scored", eval=name, task=spec.name, version=version, split=split, sampling=mode,
            episodes=score.episodes, success=score.success, reward_mean=score.reward_mean, complete=score.complete,
        )  # fmt: skip
        return score

    async def _episode(self, instance: TaskInstance, member: int, version: Version, mode: Mode) -> Trajectory:
        async with self._slots:
            started = asyncio.get_running_loop().time()
            base = self._sampling[instance.task]
            for attempt in range(ATTEMPTS):
                seed = seed_of(self._seed, "eval", instance.task, instance.epoch, instance.index, member, attempt)
                trajectory = await self._rollout.attempt(
                    Attempt(
                        instance=instance, member=member, attempt=attempt, pin=version,
                        sampling=replace(base, seed=seed, temperature=base.temperature if mode == "sampled" else 0.0),
                        work_until_s=work_deadline(started, self._trajectory_s),
                        close_until_s=started + self._trajectory_s,
                    )
                )  # fmt: skip
                why = trajectory.failure
                if why is None or not why.retryable:
                    break
            self._keep(trajectory)
            return trajectory
