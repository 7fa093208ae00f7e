"""Workloads: what tasks ask of the machines, as published, and the draws from them.

One file per task in `workloads/`; one set of parameters serves every experiment. Invariants: whatever is random is drawn from
what it is for (seed, task, instance, epoch, member, attempt, turn), never from the order in which a schedule asks; lengths of
one prompt are correlated within its group and across epochs as measured (log L = mu + prompt + prompt x epoch + sampling);
runaways and failures are drawn before anything is decided. Each parameter says where it is from, and a workload is as
certain as its least certain parameter.

Sources are in the files; the correlation of lengths: TailSieve (arXiv 2608.22788), raw variance shares of prompt, prompt x
checkpoint and sampling 65 / 7 / 26 %, which as deviations of the logarithm are 0.86, 0.23 and 0.43.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any, Literal

import yaml
from pydantic import Field

from rollart.config.nearest import among
from rollart.config.node import Node
from rollart.core.errors import ConfigError, failure
from rollart.core.seeds import unit
from rollart.core.types import Failure, TrajId, TurnRequest
from rollart.sim.envs import Call, EnvModel
from rollart.sim.laws import Law, normal
from rollart.sim.storms import STORM_INSTANCES, ImagePulls, Pull, Storm

Kind = Literal["stated", "secondary", "figure", "inferred"]
"""How certain: said by its source; seen in a summary only; read off a plot; concluded by us."""
CERTAINTY: tuple[Kind, ...] = ("stated", "secondary", "figure", "inferred")
EPOCH_MEMORY = 0.9
"""How much of a prompt's drift of an epoch is left in the next one."""


class Lengths(Node):
    """Sampled tokens of a turn."""

    median: float = Field(gt=0)
    sd_prompt: float = Field(default=0.86, ge=0)
    """Deviation of the logarithm between problems."""
    sd_epoch: float = Field(default=0.23, ge=0)
    """Of one problem between epochs."""
    sd_sampling: float = Field(default=0.43, ge=0)
    """Of one problem and epoch between attempts."""
    sd_turn: float = Field(default=0.0, ge=0)
    """Of one attempt between its turns."""
    runaway: float = Field(default=0.0, ge=0, lt=1)
    """Mean chance that an attempt never stops by itself; it varies between problems."""
    cap: int = Field(ge=1)
    """Most tokens of a turn."""


class Workload(Node):
    """One task as a load."""

    about: str
    sources: Mapping[str, tuple[str, Kind]]
    """Parameter -> source and how certain it is."""
    turns: Law
    prompt_tokens: Law
    """First observation, instructions included."""
    observation_tokens: Law
    """Each further one."""
    response: Lengths
    open_s: Law
    """Setting an environment up, its first observation included."""
    step_s: Law
    score_s: Law
    success: float = Field(ge=0, le=1)
    """Mean reward; problems differ in it."""
    step_failure: float = Field(default=0.0, ge=0, lt=1)
    """Chance of a call to fail for good."""
    storm: Storm | None = None
    pull: ImagePulls | None = None
    """None: there are no images, or they are always there."""

    @property
    def certainty(self) -> Kind:
        """That of the least certain parameter."""
        return max((kind for _, kind in self.sources.values()), key=CERTAINTY.index, default="inferred")


def workload(name: str) -> Workload:
    """The workload of that name in the package. Raises ConfigError for another."""
    known = workload_names()
    if name not in known:
        raise ConfigError(f"workload {name!r} is not known; {among(name, known)}")
    return _read(name)


def workload_names() -> tuple[str, ...]:
    names = (file.name for file in files("rollart.sim").joinpath("workloads").iterdir())
    return tuple(sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml")))


@cache
def _read(name: str) -> Workload:
    text = files("rollart.sim").joinpath(f"workloads/{name}.yaml").read_text(encoding="utf-8")
    written: dict[str, Any] = yaml.safe_load(text)
    return Workload.model_validate(written)


def of_this_turn(request: TurnRequest) -> int:
    """What earlier requests of the same turn have sampled: it stands at the end of the context."""
    tokens = 0
    if request.id.part:
        for piece in reversed(request.context.pieces):
            if not piece.sampled:
                break
            tokens += piece.n_tokens
    return tokens


class _Where:
    """What a trajectory's id says; parsed once per id."""

    __slots__ = ("epoch", "member", "problem")

    def __init__(self, traj: TrajId) -> None:
        _, task, epoch, index, member = traj.split("/")
        self.problem = (task, index)
        self.epoch = int(epoch)
        self.member = member


class Draws:
    """What the trajectories of a workload do, in a run with this seed."""

    def __init__(self, load: Workload, seed: int) -> None:
        self.load = load
        self._seed = seed
        self._where: dict[TrajId, _Where] = {}
        self._log_length: dict[tuple[TrajId, int], float] = {}
        self._turns: dict[tuple[TrajId, int], int] = {}

    def env(self) -> EnvModel:
        """The same as a model of environments."""
        return EnvModel(
            latency_s=self.latency_s, fault=self.fault, turns=self.turns, reward=self.reward, tokens=self.observed_tokens,
            pull=self.pull if self.load.pull else None,
        )  # fmt: skip

    def turns(self, traj: TrajId, attempt: int) -> int:
        known = self._turns.get((traj, attempt))
        if known is None:
            known = self._turns[traj, attempt] = max(1, round(self.load.turns.at(self._unit("turns", traj, attempt))))
        return known

    def observed_tokens(self, traj: TrajId, attempt: int, turn: int) -> int:
        """Tokens of the observation before turn `turn`; the first one is the problem's, whoever attempts it."""
        if turn == 0:
            place = unit(self._seed, "prompt", self._of(traj).problem)
            return max(1, round(self.load.prompt_tokens.at(place)))
        return max(1, round(self.load.observation_tokens.at(self._unit("observed", traj, attempt, turn))))

    def sampled_tokens(self, request: TurnRequest) -> int:
        """Tokens of a turn, were it not stopped: a runaway never ends by itself."""
        rid, law = request.id, self.load.response
        if self._runs_away(rid.traj, rid.attempt):
            return law.cap + 1  # whatever it has so far, it is not over
        own = self._log_length.get((rid.traj, rid.attempt))
        if own is None:
            own = self._log_length[rid.traj, rid.attempt] = self._attempts_log_length(rid.traj, rid.attempt)
        turn = law.sd_turn * normal(self._seed, "turn", rid.traj, rid.attempt, rid.turn) if law.sd_turn else 0.0
        return max(1, min(law.cap, round(math.exp(own + turn))) - of_this_turn(request))

    def _attempts_log_length(self, traj: TrajId, attempt: int) -> float:
        law, where = self.load.response, self._of(traj)
        own = math.log(law.median) + law.sd_prompt * normal(self._seed, "problem", where.problem)
        own += law.sd_epoch * self._drift(where.problem, where.epoch)
        return own + law.sd_sampling * normal(self._seed, "sampling", traj, attempt)

    def _drift(self, problem: tuple[str, str], epoch: int) -> float:
        """A standard normal number per problem and epoch, neighbours alike."""
        drift = normal(self._seed, "drift", problem, 0)
        for past in range(1, epoch + 1):
            fresh = normal(self._seed, "drift", problem, past)
            drift = EPOCH_MEMORY * drift + math.sqrt(1.0 - EPOCH_MEMORY**2) * fresh
        return drift

    def _runs_away(self, traj: TrajId, attempt: int) -> bool:
        mean = self.load.response.runaway
        if not mean:
            return False
        # exponential over problems: a few run away often, most nearly never
        chance = min(1.0, -mean * math.log(unit(self._seed, "runaway", self._of(traj).problem)))
        return self._unit("runs away", traj, attempt) < chance

    def latency_s(self, traj: TrajId, attempt: int, call: Call, turn: int) -> float:
        match call:
            case "open":
                storm = self._storm(traj, attempt)
                law = self.load.open_s if storm is None else storm.seconds
                return law.at(self._unit("open", traj, attempt))
            case "step":
                return self.load.step_s.at(self._unit("step", traj, attempt, turn))
            case _:
                return 0.0

    def fault(self, traj: TrajId, attempt: int, call: Call, turn: int) -> Failure | None:
        if call == "open":
            storm = self._storm(traj, attempt)
            if storm is not None and self._unit("storm fails", traj, attempt) < storm.fails:
                return failure("env", "raised", f"{traj} could not be set up")
        elif call == "step" and self._unit("fails", traj, attempt, turn) < self.load.step_failure:
            return failure("env", "raised", f"the environment of {traj} failed")
        return None

    def pull(self, traj: TrajId, attempt: int) -> Pull | None:
        """The image that has to come first: siblings have one size, each may find it cached."""
        images = self.load.pull
        if images is None:
            return None
        size = unit(self._seed, "image", self._of(traj).problem)
        return images.pull(size=size, cached=self._unit("cached", traj, attempt))

    def _storm(self, traj: TrajId, attempt: int) -> Storm | None:
        """The storm that this attempt is set up in, if any."""
        storm, where = self.load.storm, self._of(traj)
        if storm is None:
            return None
        block = (where.problem[0], where.epoch, int(where.problem[1]) // STORM_INSTANCES)
        if unit(self._seed, "storm", block) >= storm.chance:
            return None
        share = storm.share.at(unit(self._seed, "storm's share", block))
        return storm if self._unit("in the storm", traj, attempt) < share else None

    def reward(self, traj: TrajId, attempt: int) -> float:
        """0 or 1; how likely differs between problems (uniform around the mean, as far as 0 and 1 allow)."""
        reach = min(self.load.success, 1.0 - self.load.success)
        chance = self.load.success + reach * (2.0 * unit(self._seed, "hard", self._of(traj).problem) - 1.0)
        return float(self._unit("reward", traj, attempt) < chance)

    def score_s(self, traj: TrajId, attempt: int, nth: int = 0) -> float:
        """Of the `nth` try to score it."""
        return self.load.score_s.at(self._unit("score", traj, attempt, *([nth] if nth else ())))

    def _unit(self, what: str, traj: TrajId, *address: int) -> float:
        return unit(self._seed, what, traj, *address)

    def _of(self, traj: TrajId) -> _Where:
        where = self._where.get(traj)
        if where is None:
            where = self._where[traj] = _Where(traj)
        return where
