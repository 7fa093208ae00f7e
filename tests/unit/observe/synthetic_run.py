"""A made-up run with the shape of a real one: two tasks that learn, an engine, env hosts, a trainer, and some bad luck.

Deterministic in its arguments. Events go through the real `Recorder` and tokens through the real `Ledger`, so what it
emits obeys the closed set of kinds and its ledger closes.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from rollart.core.events import Recorder, header
from rollart.core.ledger import Ledger
from rollart.core.types import Segment, Span, TaskInstance, Tokens, Trajectory, TrajId
from rollart.observe.log import EventWriter
from rollart.observe.metric_rows import Row
from rollart.observe.metrics import rows_of
from rollart.observe.trajectories import Encoded, TrajectoryWriter

GROUP, GROUPS_PER_BATCH, MAX_STALENESS = 8, 8, 1
TASKS = ("frozen_lake", "max_digit")
MAZE = ("SFFF", "FHFH", "FFFH", "HFFG")
BEST_PATH = "DDRRDR"
EVAL_EPISODES = 80


@dataclass
class Group:
    id: str
    task: str
    index: int
    finished: list[Trajectory] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(trajectory.n_sampled for trajectory in self.finished)

    @property
    def oldest(self) -> int:
        return min(trajectory.oldest_version or 0 for trajectory in self.finished)


class SyntheticRun:
    """`events` and `trajectories` are filled by the constructor. Virtual seconds; nothing waits."""

    def __init__(self, *, steps: int = 20, seed: int = 0, engines: int = 1, status: str = "done") -> None:
        self.header = header(run="first_run", incarnation=1, clock="monotonic", world="local", git="0000000")
        self.events: list[dict[str, Any]] = []
        self.trajectories: list[Trajectory] = []
        self.rng = random.Random(seed)
        self.now = 0.0
        self.steps = steps
        self.engines = {f"engine-{index}": 0 for index in range(engines)}
        self.engine_version = dict.fromkeys(self.engines, 0)
        self.sampled = dict.fromkeys(self.engines, 0)
        self.emit = Recorder((lambda event: self.events.append(dict(event)),), lambda: self.now)
        self.ledger = Ledger()
        self.queue: list[tuple[float, int, Callable[[], None]]] = []
        self.order = 0
        self.version = 0
        self.next_index = dict.fromkeys(TASKS, 0)
        self.live_or_trained = dict.fromkeys(TASKS, 0)
        self.outstanding = 0
        self.open: dict[str, Group] = {}
        self.buffer: list[Group] = []
        self.training = False
        self.wait_since = 0.0
        self.step = 0
        self._run(status)

    # --- the kernel

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        self.order += 1
        heapq.heappush(self.queue, (self.now + seconds, self.order, call))

    def drain(self, until: Callable[[], bool] = lambda: False) -> None:
        while self.queue and not until():
            self.now, _, call = heapq.heappop(self.queue)
            call()

    # --- phases

    def _run(self, status: str) -> None:
        emit = self.emit
        emit(
            "run_started",
            recipe="first_run",
            steps=self.steps,
            batch=GROUP * GROUPS_PER_BATCH,
            group_size=GROUP,
            max_staleness=MAX_STALENESS,
            sync_order="early",
            mix={"frozen_lake": 1.0, "max_digit": 1.0},
            success_at={"frozen_lake": 1.0, "max_digit": 1.0},
        )
        self.now += 3.4
        for engine in self.engines:
            emit("engine_joined", engine=engine, pool="local", version=-1)
        emit("host_joined", host="env-0")
        self.now += 0.8
        for task, chance, constant, answer in (("frozen_lake", 0.014, 1.0, BEST_PATH), ("max_digit", 0.1, 0.271, "9")):
            emit("baseline", task=task, policy="random", success=chance, episodes=256, answer=None)
            emit("baseline", task=task, policy="constant", success=constant, episodes=256, answer=answer)
            self.now += 0.3
        self.now += 5.1
        emit("warm_started", steps=100, tokens=61_440, loss=0.83, seconds=5.1)
        self._published(0, -1)
        self.drain()
        self._evaluate("before")
        self.wait_since = self.now
        self._admit()
        self.drain(lambda: self.step >= self.steps)
        self._drop_rest()
        self.drain()
        if status == "done":
            self._evaluate("after")
        self._book()
        if status != "killed":
            emit(
                "run_finished",
                status=status,
                why=f"{self.step} steps are trained" if status == "done" else "stopped by hand",
            )

    def _evaluate(self, name: str) -> None:
        self.emit("eval_started", eval=name, version=self.version, tasks=list(TASKS))
        for index in range(EVAL_EPISODES // GROUP):
            for task in TASKS:
                for member in range(GROUP):
                    instance = TaskInstance(task=task, epoch=0, index=index, seed=index, purpose="eval")
                    self.after(0.002 * (index * GROUP + member), lambda i=instance, m=member: self._start(i, m, 0))  # type: ignore[misc]
        self.drain()
        for task in TASKS:
            rewards = [t.reward or 0.0 for t in self.trajectories if t.id.startswith(f"eval/{task}/")][-EVAL_EPISODES:]
            split = "held_out" if task == "max_digit" else "train"
            for sampling in ("sampled", "greedy") if name == "after" else ("sampled",):
                success = sum(reward >= 1 for reward in rewards) / len(rewards)
                success = round(1.0 if sampling == "greedy" and success > 0.7 else success, 4)
                self.emit(
                    "eval_scored",
                    eval=name,
                    task=task,
                    version=self.version,
                    split=split,
                    sampling=sampling,
                    episodes=len(rewards),
                    success=success,
                    reward_mean=success,
                    complete=True,
                )
        self.emit("eval_finished", eval=name, version=self.version, complete=True)

    def _drop_rest(self) -> None:
        """The run has its steps: what is buffered stays so in the ledger, what is open is aborted."""
        for group in list(self.open.values()):
            self._drop_group(group, "redundant")

    def _book(self) -> None:
        ledger = self.ledger
        assert ledger.accounted == sum(self.sampled.values())
        self.emit(
            "ledger",
            sampled=sum(self.sampled.values()),
            trained=ledger.trained,
            dropped={reason: tokens for reason, tokens in ledger.dropped.items() if tokens},
            buffered=ledger.buffered,
            in_flight=ledger.in_flight,
            eval=ledger.eval,
            engines=dict(self.sampled),
        )

    # --- groups

    def _admit(self) -> None:
        capacity = (MAX_STALENESS + 1) * GROUPS_PER_BATCH
        left = (self.steps - self.step - self.training) * GROUPS_PER_BATCH - len(self.buffer) - len(self.open)
        while self.outstanding < capacity and left > 0:
            task = min(TASKS, key=lambda name: self.live_or_trained[name])
            index = self.next_index[task]
            self.next_index[task] += 1
            self.live_or_trained[task] += 1
            self.outstanding += 1
            left -= 1
            instance = TaskInstance(task=task, epoch=index // 800, index=index % 800, seed=index % 800)
            group = Group(instance.group_id, task, index)
            self.open[group.id] = group
            self.emit("group_opened", group=group.id, task=task, members=GROUP, room=capacity - self.outstanding)
            for member in range(GROUP):
                self._start(instance, member, 0)

    def _group_done(self, group: Group) -> None:
        del self.open[group.id]
        self.ledger.move("in_flight", "buffered", group.tokens)
        self.buffer.append(group)
        rewards = [trajectory.reward or 0.0 for trajectory in group.finished]
        mean = sum(rewards) / len(rewards)
        self.emit(
            "group_completed",
            group=group.id,
            task=group.task,
            members=len(rewards),
            reward_mean=mean,
            oldest_version=group.oldest,
        )
        self._train()

    def _drop_group(self, group: Group, reason: str) -> None:
        if self.open.pop(group.id, None) is None:
            self.buffer.remove(group)
        else:
            self.ledger.move("in_flight", "buffered", group.tokens)
        self.outstanding -= 1
        self.live_or_trained[group.task] -= 1
        self.emit("group_dropped", group=group.id, task=group.task, reason=reason, tokens=group.tokens)
        if group.tokens:
            self.ledger.drop("buffered", reason, group.tokens)  # type: ignore[arg-type]

    # --- trajectories

    def _skill(self, task: str, version: int) -> float:
        midpoint, floor = (self.steps * 0.45, 0.01) if task == "frozen_lake" else (self.steps * 0.25, 0.1)
        return floor + (0.985 - floor) / (1 + math.exp(-(version - midpoint) / (self.steps * 0.07)))

    def _start(self, instance: TaskInstance, member: int, attempt: int) -> None:
        traj = instance.traj_id(member)
        life = _Life(instance, member, attempt, self.now)
        self.emit(
            "traj_started",
            traj=traj,
            attempt=attempt,
            group=instance.group_id,
            task=instance.task,
            purpose=instance.purpose,
        )
        seconds = 0.002 + self.rng.random() * 0.004

        def opened() -> None:
            self.emit("env_opened", traj=traj, attempt=attempt, host="env-0", seconds=seconds)
            life.spent["open"] = seconds
            life.say(*_prompt(instance))
            self._turn(life)

        self.after(seconds, opened)

    def _turn(self, life: _Life) -> None:
        engine = min(self.engines, key=lambda name: self.engines[name])
        ids = {"traj": life.traj, "attempt": life.attempt, "turn": life.turn, "part": 0, "engine": engine}
        self.emit("turn_routed", **ids, load=self.engines[engine], sticky=life.turn > 0 and len(self.engines) == 1)
        self.engines[engine] += 1
        seconds = 0.004 + 0.0006 * self.engines[engine] * (1 + self.rng.random())
        version = self.engine_version[engine]
        action = self._act(life, version)
        ended_at, skew = self.now, seconds

        def done() -> None:
            self.engines[engine] -= 1
            life.spent["generate"] += seconds
            self.sampled[engine] += 2
            purpose = life.instance.purpose
            self.ledger.deliver(engine, 2, purpose)
            if life.aborted_by(self):
                if purpose == "train":
                    self.ledger.drop("in_flight", "redundant", life.sampled + 2)
                life.act(action, version, self.rng)
                self.emit("turn_done", **ids, **_turn_facts(skew, version, "aborted", life))
                self._finish(life, "aborted", "redundant", None)
                return
            life.act(action, version, self.rng)
            self.emit("turn_done", **ids, **_turn_facts(self.now - ended_at, version, "stop", life))
            self._step(life, action)

        self.after(seconds, done)

    def _act(self, life: _Life, version: int) -> str:
        task, skill = life.instance.task, self._skill(life.instance.task, version)
        if self.rng.random() < 0.08 * (1 - skill):
            return "?"
        if task == "max_digit":
            digits = f"{life.instance.seed % 1000:03d}"
            return max(digits) if self.rng.random() < skill else self.rng.choice(digits)
        return life.hint if self.rng.random() < skill else self.rng.choice("LDRU")

    def _step(self, life: _Life, action: str) -> None:
        seconds = min(0.5, self.rng.lognormvariate(-5.5, 0.9))

        def stepped() -> None:
            if self.rng.random() < 0.001 and life.instance.purpose == "train":
                self._fail(life)
                return
            life.spent["step"] += seconds
            text, reward, ended = life.reply(action)
            bad = action == "?"
            life.bad_actions += bad
            self.emit(
                "env_stepped", traj=life.traj, attempt=life.attempt, turn=life.turn, seconds=seconds, bad_action=bad
            )
            life.turn += 1
            if not ended:
                life.say(text)
                self._turn(life)
                return
            life.spent["score"] = 0.0002
            self.emit("scored", traj=life.traj, attempt=life.attempt, seconds=0.0002, reward=reward)
            self._finish(life, "done", "env_done" if life.turn < 20 else "max_turns", reward)

        self.after(seconds, stepped)

    def _fail(self, life: _Life) -> None:
        self.emit(
            "failure_decided",
            traj=life.traj,
            attempt=life.attempt,
            failure="env timeout: no answer in 30 s",
            decision="Retry",
        )
        if life.sampled:
            self.ledger.drop("in_flight", "env_failed", life.sampled)
        self._finish(life, "failed", "timeout", None)
        self.after(0.1, lambda: self._start(life.instance, life.member, life.attempt + 1))

    def _finish(self, life: _Life, status: Any, cause: str, reward: float | None) -> None:
        trajectory = life.trajectory(status, cause, reward, self.now)
        self.trajectories.append(trajectory)
        self.emit(
            "traj_finished",
            traj=trajectory.id,
            attempt=trajectory.attempt,
            group=trajectory.group_id,
            task=trajectory.instance.task,
            purpose=trajectory.instance.purpose,
            status=status,
            cause=cause,
            reward=reward,
            turns=trajectory.turns,
            bad_actions=trajectory.bad_actions,
            sampled=trajectory.n_sampled,
            context=sum(segment.n_tokens for segment in trajectory.segments),
            oldest_version=trajectory.oldest_version,
            newest_version=trajectory.newest_version,
            spans=len(trajectory.spans),
            metrics=dict(trajectory.metrics),
            seconds=dict(trajectory.timings),
        )
        group = self.open.get(trajectory.group_id)
        if group is not None and status == "done":
            group.finished.append(trajectory)
            if len(group.finished) == GROUP:
                self._group_done(group)

    # --- training

    def _train(self) -> None:
        if self.training or self.step >= self.steps:
            return
        for group in [group for group in self.buffer if self.version - group.oldest > MAX_STALENESS]:
            self._drop_group(group, "stale")
            self._admit()
        batch: list[Group] = []
        for task in TASKS:
            batch += [group for group in self.buffer if group.task == task][: GROUPS_PER_BATCH // 2]
        if len(batch) < GROUPS_PER_BATCH:
            return
        for group in batch:
            self.buffer.remove(group)
        self.training = True
        stale = [self.version - (t.oldest_version or 0) for group in batch for t in group.finished]
        tokens = sum(group.tokens for group in batch)
        self.emit(
            "batch_released",
            step=self.step,
            version=self.version,
            groups=[group.id for group in batch],
            trajectories=len(stale),
            tokens=tokens,
            staleness_mean=sum(stale) / len(stale),
            staleness_max=max(stale),
            waited_s=self.now - self.wait_since,
            quota=dict.fromkeys(TASKS, GROUPS_PER_BATCH // 2),
        )
        self.emit("step_started", step=self.step, version=self.version)
        seconds = 0.22 + 0.06 * self.rng.random()
        self.after(seconds, lambda: self._step_done(batch, tokens, seconds))

    def _step_done(self, batch: list[Group], tokens: int, seconds: float) -> None:
        progress = (self.step + 1) / self.steps
        metrics = {
            "loss": -0.04 * (1 - progress) + 0.01 * self.rng.gauss(0, 1),
            "grad_norm": 0.3 + 0.9 * (1 - progress) * self.rng.random(),
            "lr": 1e-3,
            "weights_changed": 1.0,
            "entropy": 1.25 * math.exp(-3 * progress) + 0.02 * self.rng.random(),
            "clip_frac": 0.02 + 0.05 * self.rng.random(),
            "mismatch_abs_mean": 2e-7 * (1 + self.rng.random()),
        }
        self.emit("loop_lag", worst_s=0.004, p99_s=0.002, seconds=10.0)
        self.emit(
            "step_finished",
            step=self.step,
            version=self.version,
            seconds=seconds,
            trained_tokens=tokens,
            metrics=metrics,
        )
        self.version += 1
        self.after(0.012, lambda: self._trained(tokens))

    def _trained(self, tokens: int) -> None:
        self._published(self.version, self.step)
        self.ledger.move("buffered", "trained", tokens)
        self._book()
        self.step += 1
        self.wait_since, self.training = self.now, False
        self._train()

    def _published(self, version: int, step: int) -> None:
        digest = f"{version:08x}"
        self.emit("published", step=step, version=version, seconds=0.012, bytes=461_824, buckets=1, digest=digest)
        for engine in self.engines:

            def fetched(engine: str = engine) -> None:
                self.emit("prefetched", engine=engine, version=version, seconds=0.004)
                self.after(0.009, lambda: apply(engine))

            def apply(engine: str) -> None:
                self.engine_version[engine] = max(version, self.engine_version[engine])
                live = self.engines[engine]
                exposed = 0.006 if live else 0.0
                facts = {"seconds": 0.009, "exposed_s": exposed, "live": live, "digest": digest, "matches": True}
                self.emit("applied", engine=engine, version=version, **facts)
                if version and engine == list(self.engines)[-1]:
                    self.outstanding -= GROUPS_PER_BATCH
                    self._admit()

            self.after(0.004, fetched)

    def rows(self) -> list[Row]:
        """The metric rows of the run."""
        return rows_of(self.events)

    def write(self, folder: Path) -> Path:
        """The run's folder as the real sinks write it."""
        with EventWriter(folder / "events.jsonl", self.header) as events:
            for event in self.events:
                events(event)
        keep = TrajectoryWriter(folder / "trajectories.jsonl", encode, pieces)
        for trajectory in self.trajectories:
            keep(trajectory)
        keep.close()
        return folder


@cache
def synthetic(*, steps: int = 12, seed: int = 0, engines: int = 1, status: str = "done") -> SyntheticRun:
    """The same run for every test that only reads it."""
    return SyntheticRun(steps=steps, seed=seed, engines=engines, status=status)


def encode(payload: Any) -> Encoded:
    text, logprobs = payload
    return Encoded([ord(char) for char in text], logprobs)


def pieces(ids: Sequence[int]) -> list[str]:
    return [chr(token) for token in ids]


class _Life:
    """One attempt while it runs."""

    def __init__(self, instance: TaskInstance, member: int, attempt: int, began: float) -> None:
        self.instance, self.member, self.attempt, self.began = instance, member, attempt, began
        self.traj: TrajId = instance.traj_id(member)
        self.turn = self.bad_actions = self.sampled = self.place = 0
        self.pieces: list[Tokens] = []
        self.spent = dict.fromkeys(("open", "generate", "step", "score"), 0.0)

    @property
    def hint(self) -> str:
        """A move that leads on towards the goal."""
        column = self.place % 4
        return {0: "D", 4: "D", 8: "R", 9: "R", 10: "D", 13: "R", 14: "R"}.get(self.place, "L" if column else "D")

    def aborted_by(self, run: SyntheticRun) -> bool:
        return self.instance.purpose == "train" and self.instance.group_id not in run.open

    def say(self, text: str) -> None:
        self.pieces.append(Tokens(n_tokens=len(text), payload=(text, None)))

    def act(self, action: str, version: int, rng: random.Random) -> None:
        self.sampled += 2
        logprobs = [-rng.expovariate(4.0), -rng.expovariate(40.0)]
        self.pieces.append(
            Tokens(n_tokens=2, spans=(Span(version=version, n_tokens=2),), payload=(action + "\n", logprobs))
        )

    def reply(self, action: str) -> tuple[str, float, bool]:
        if self.instance.task == "max_digit":
            return "", float(action == max(f"{self.instance.seed % 1000:03d}")), True
        row, column = divmod(self.place, 4)
        row += {"D": 1, "U": -1}.get(action, 0)
        column += {"R": 1, "L": -1}.get(action, 0)
        if 0 <= row < 4 and 0 <= column < 4:
            self.place = 4 * row + column
        cell = MAZE[self.place // 4][self.place % 4]
        ended = cell in "HG" or self.turn >= 19
        return ("?\n" if action == "?" else "") + _maze(self.place) + "> ", float(cell == "G"), ended

    def trajectory(self, status: Any, cause: str, reward: float | None, now: float) -> Trajectory:
        return Trajectory(
            id=self.traj,
            attempt=self.attempt,
            group_id=self.instance.group_id,
            instance=self.instance,
            member=self.member,
            segments=(Segment(pieces=tuple(self.pieces)),),
            status=status,
            finish_cause=cause,
            reward=reward,
            turns=self.turn,
            bad_actions=self.bad_actions,
            metrics={"path_length": float(self.turn)} if self.instance.task == "frozen_lake" else {},
            timings={**self.spent, "total": now - self.began},
        )


def _turn_facts(seconds: float, version: int, finish: str, life: _Life) -> dict[str, Any]:
    context = sum(piece.n_tokens for piece in life.pieces)
    fresh = life.pieces[-2].n_tokens if len(life.pieces) > 1 else context
    return {
        "seconds": seconds,
        "sampled": 2,
        "spans": [[version, 2]],
        "finish": finish,
        "prefilled": fresh,
        "rebuilt": 0,
    }


def _maze(place: int) -> str:
    rows = ["".join("*" if 4 * r + c == place else MAZE[r][c] for c in range(4)) for r in range(4)]
    return "\n".join(rows) + "\n"


def _prompt(instance: TaskInstance) -> tuple[str]:
    if instance.task == "max_digit":
        return (f"max {' '.join(f'{instance.seed % 1000:03d}')} = ",)
    return ("Reach G.\n" + _maze(0) + "> ",)
