"""A batch workload on one engine in steady state: throughput, time per token, time to the first token.

Owns: how admission, continuous batching, prompts and the end of a burst turn step times into the figures that benchmarks
report. Invariant: all in closed form or a bisection, no event per token or request; an offered rate is never exceeded.
Why: published measurements of engines are of whole workloads, so a step model can only be checked through this.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from rollart.core.errors import ConfigError
from rollart.perf.engines import EngineFacts
from rollart.perf.inference import EngineCost
from rollart.perf.lengths import Lengths, varied

DRAIN_PIECES = 12
"""Pieces in which the end of a burst is integrated."""
PLACES = 24
"""Grid on which a time of waiting and a length are combined."""
BISECTIONS = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests of `prompt` tokens that are answered with `answer` tokens, on average; all at once or at a rate."""

    prompt: float
    answer: float
    lengths: Literal["fixed", "varied"] = "fixed"
    requests: float = math.inf
    rate_per_s: float = math.inf
    concurrency: float = math.inf
    """Most requests that the client keeps open."""
    beams: int = 1
    """Sequences that decode for one request from one prompt."""

    def __post_init__(self) -> None:
        for label in ("prompt", "answer", "requests", "rate_per_s", "concurrency"):
            value = getattr(self, label)
            if not value > 0 or (label in ("prompt", "answer") and not math.isfinite(value)):
                raise ConfigError(f"workload: {label} is {value}; give a number above 0")

    @property
    def law(self) -> Lengths:
        return varied(self.answer, self.prompt) if self.lengths == "varied" else Lengths(self.answer)

    @property
    def sequences(self) -> float:
        return self.requests * self.beams

    @property
    def read_per_sequence(self) -> float:
        """Prompt tokens that are read, and kept, for each sequence."""
        return self.prompt / self.beams


class Gap(NamedTuple):
    """So many tokens came at such a distance from the one before."""

    tokens: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """An engine with its cost and its habits."""

    cost: EngineCost
    facts: EngineFacts
    max_sequences: float = 0.0
    max_step_tokens: float = 0.0
    """Of a rank; 0: the engine's default."""

    @property
    def sequences(self) -> float:
        return (self.max_sequences or self.facts.max_sequences) * self.cost.attention_dp

    @property
    def step_tokens(self) -> float:
        return (self.max_step_tokens or self.facts.max_step_tokens) * self.cost.attention_dp

    def step_s(self, batch: float, context: float, prefill: float = 0.0, prompt: float = 0.0) -> float:
        """One step that reads `prefill` tokens of prompts of `prompt`; each sees half of its prompt on average."""
        return self.whole_step_s(batch, context, prefill, prompt / 2.0)

    def whole_step_s(self, batch: float, context: float, prefill: float, prefill_context: float) -> float:
        """One step with the host's part on the critical path, averaged over the steps of one visit of the scheduler."""
        eff, facts, dp = self.cost.efficiency, self.facts, self.cost.attention_dp
        device = self.cost.step_s(batch, context, prefill=prefill, prefill_context=prefill_context)
        host = facts.host * (eff.host_step_s + eff.host_sequence_s * batch / dp) / facts.steps_per_schedule
        return max(device, host * self.cost.factor) if facts.overlapped else device + host * self.cost.factor

    def room(self, workload: Workload) -> float:
        """Most sequences that the cache, the engine's limits and the client let run together."""
        grown = workload.answer if self.facts.reserves else workload.law.age
        held = workload.read_per_sequence + grown
        if self.facts.frees_windows:
            held = self.cost.sequence_tokens(held)
        capacity = self.cost.kv_capacity_tokens()
        fits = capacity / max(held, 1.0)
        if fits < 1.0:
            raise ConfigError(
                f"a sequence of {held:.0f} tokens of {self.cost.shape.name} does not fit: the cache of {self.cost.ranks} "
                f"{self.cost.device.name} holds {capacity:.0f} tokens; shorten it or raise tp, pp or dp"
            )
        most = min(fits, self.sequences, workload.sequences, workload.concurrency * workload.beams)
        if self.facts.mixed:
            most = min(most, self.step_tokens * workload.answer / (workload.read_per_sequence + workload.answer))
        return max(most, 1.0)

    def read_s(self, workload: Workload) -> float:
        """Seconds per sequence while nothing but prompts is read."""
        return self.step_s(0.0, 0.0, self.step_tokens, workload.prompt) / self.step_tokens * workload.read_per_sequence

    def context(self, workload: Workload) -> float:
        """Mean tokens that a running sequence attends to: the longer answers are met more often."""
        return workload.prompt + workload.law.age


class Round(NamedTuple):
    """The steps in which each running sequence gets one token on average, prompts of newcomers included."""

    seconds: float
    plain_s: float
    loaded_s: float
    loaded_share: float
    """Of the steps, those with a prompt's part in them."""


class Ramp(NamedTuple):
    """Until the engine is full: so many seconds, so many sequences admitted, some of which have ended."""

    seconds: float
    sequences: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What the engine (all of its ranks, one replica) does with the workload."""

    server: Server
    workload: Workload
    tokens_per_s: float
    """Answer tokens over the makespan, or in steady state without a number of requests."""
    batch: float
    """Sequences that decode together while the engine is full or the rate is met."""
    steady: Round
    gaps: tuple[Gap, ...]
    """Tokens by their distance from the one before."""
    saturated: bool

    @property
    def tpot_s(self) -> float:
        """Mean time per token after the first."""
        return sum(gap.tokens * gap.seconds for gap in self.gaps) / sum(gap.tokens for gap in self.gaps)

    @property
    def median_tpot_s(self) -> float:
        return self.tpot_quantile_s(0.5)

    @property
    def mean_itl_s(self) -> float:
        """Mean distance of two deliveries; an engine that visits its scheduler rarely delivers several tokens at once."""
        return self.tpot_s * self.server.facts.steps_per_schedule

    @property
    def median_itl_s(self) -> float:
        usual = self.steady.plain_s if self.steady.loaded_share < 0.5 else self.steady.loaded_s
        return min(usual, self.median_tpot_s) * self.server.facts.steps_per_schedule

    @property
    def first_wait_s(self) -> float:
        """From arrival to the first token on an engine that keeps up: the step under way, then the prompt's own."""
        w, server = self.workload, self.server
        batch = self.batch if server.facts.mixed else 0.0
        own = server.step_s(batch, server.context(w), w.prompt, w.prompt)
        return own + self.steady.plain_s * server.facts.steps_per_schedule / 2.0

    def ttft_s(self, quantile: float | None = None) -> float:
        """Time to the first token of that quantile of the requests; without one the mean."""
        places = [(place + 0.5) / PLACES for place in range(PLACES)]
        return sum(map(self._start_s, places)) / PLACES if quantile is None else self._start_s(quantile)

    def _start_s(self, share: float) -> float:
        w = self.workload
        if not self.saturated or not math.isfinite(w.requests):
            return self.first_wait_s
        place = share * w.sequences
        arrival = share * w.requests / w.rate_per_s
        first = ramp(self.server, w, self.batch, self.steady)
        if place <= first.sequences:
            start = max(arrival, self.server.read_s(w) * place)
        else:
            admitted_per_s = self.batch / (w.answer * self.steady.seconds)
            start = first.seconds + (place - first.sequences) / admitted_per_s
        return max(start - arrival, 0.0) + self.first_wait_s

    def e2e_s(self, quantile: float | None = None) -> float:
        """Time from arrival to the last token; lengths do not depend on the place in the queue."""
        law = self.workload.law
        if quantile is None:
            return self.ttft_s() + self.tpot_s * law.mean
        places = [(place + 0.5) / PLACES for place in range(PLACES)]
        waits = [self._start_s(place) for place in places]
        totals = sorted(wait + self.tpot_s * law.quantile(place) for wait in waits for place in places)
        return totals[min(int(quantile * len(totals)), len(totals) - 1)]

    def tpot_quantile_s(self, quantile: float) -> float:
        return _weighted_quantile(self.gaps, quantile)


def steady_round(server: Server, workload: Workload, batch: float) -> Round:
    """One token for each of `batch` sequences, with the prompts that keep the batch at this size."""
    context = server.context(workload)
    plain = server.step_s(batch, context)
    owed = batch * workload.read_per_sequence / workload.answer
    if not server.facts.mixed:
        chunk = max(min(owed * server.facts.steps_per_schedule, server.step_tokens), workload.prompt)
        alone = server.step_s(0.0, 0.0, chunk, workload.prompt)
        share = owed / chunk
        return Round(plain + share * alone, plain, plain + alone, min(share, 1.0))
    room = max(server.step_tokens - batch, 1.0)
    chunk = room if workload.lengths == "fixed" else min(max(owed, min(workload.prompt, room)), room)
    loaded = server.step_s(batch, context, chunk, workload.prompt)
    share = min(owed / chunk, 1.0)
    return Round((1.0 - share) * plain + share * loaded, plain, loaded, share)


def ramp(server: Server, workload: Workload, batch: float, now: Round) -> Ramp:
    """How the first full batch comes together: as fast as prompts are read, or as requests come."""
    if not math.isfinite(workload.rate_per_s):
        return Ramp(server.read_s(workload) * batch, batch)
    arrivals = workload.rate_per_s * workload.beams
    life = workload.answer * now.seconds
    filled_s = -life * math.log(max(1.0 - batch / (arrivals * life), 1e-3))
    read_s = server.read_s(workload) * batch
    if filled_s <= read_s:
        return Ramp(read_s, batch)
    return Ramp(filled_s, min(arrivals * filled_s, workload.sequences))


def serve(server: Server, workload: Workload) -> Served:
    """Figures of `workload` on `server`. Raises `ConfigError` if the model does not fit."""
    batch = server.room(workload)
    now = steady_round(server, workload, batch)
    capacity = batch / (workload.answer * workload.beams * now.seconds)
    if workload.rate_per_s < capacity:
        return _keeps_up(server, workload, batch)
    if not math.isfinite(workload.requests):
        return _served(server, workload, batch, now, batch / workload.beams / now.seconds, [Gap(1.0, now.seconds)])
    if workload.lengths == "fixed":
        seconds = _waves_s(server, workload, batch, now)
        gaps = [Gap(1.0, now.seconds)]
    else:
        seconds, gaps = _burst(server, workload, batch, now)
    seconds = max(seconds, workload.requests / workload.rate_per_s)
    rate = workload.requests * workload.answer / seconds
    return _served(server, workload, batch, now, rate, gaps)


def _keeps_up(server: Server, workload: Workload, most: float) -> Served:
    """The batch at which answers end as fast as requests come."""
    low, high = 0.0, most
    for _ in range(BISECTIONS):
        middle = (low + high) / 2.0
        now = steady_round(server, workload, max(middle, 1e-3))
        busy = middle < workload.rate_per_s * workload.beams * workload.answer * now.seconds
        low, high = (middle, high) if busy else (low, middle)
    batch = max(high, 1e-3)
    now = steady_round(server, workload, max(batch, 1.0))
    seconds = workload.requests / workload.rate_per_s + workload.answer * now.seconds
    rate = workload.rate_per_s * workload.answer
    if math.isfinite(workload.requests):
        rate = workload.requests * workload.answer / seconds
    return _served(server, workload, batch, now, rate, [Gap(1.0, now.seconds)], saturated=False)


def _served(
    server: Server, workload: Workload, batch: float, now: Round, rate: float, gaps: list[Gap], *, saturated: bool = True,
) -> Served:  # fmt: skip
    return Served(
        server=server, workload=workload, tokens_per_s=rate, batch=batch, steady=now, gaps=tuple(gaps), saturated=saturated,
    )  # fmt: skip


def _weighted_quantile(gaps: Sequence[Gap], share: float) -> float:
    wanted, seen = share * sum(gap.tokens for gap in gaps), 0.0
    for gap in sorted(gaps, key=lambda gap: gap.seconds):
        seen += gap.tokens
        if seen >= wanted:
            return gap.seconds
    return max(gap.seconds for gap in gaps)


def _waves_s(server: Server, workload: Workload, batch: float, now: Round) -> float:
    """Makespan of equal requests: waves that stay together, or a stream where reading prompts spreads their ends."""
    rounds = workload.answer * now.seconds
    full = math.floor(workload.sequences / batch)
    rest = workload.sequences - full * batch
    waves = full * rounds
    if rest >= 1.0:
        waves += workload.answer * steady_round(server, workload, rest).seconds
    spread = 1.0 - now.plain_s / now.seconds
    ending = server.step_s(batch / 2.0, server.context(workload)) - now.plain_s / 2.0
    stream = workload.sequences / batch * rounds + workload.answer * ending
    return (1.0 - spread) * waves + spread * stream


def _burst(server: Server, workload: Workload, batch: float, now: Round) -> tuple[float, list[Gap]]:
    """Makespan of varied requests: read the first batch, keep it full, then let it run empty."""
    law = workload.law
    first = ramp(server, workload, batch, now)
    steady_tokens = (workload.sequences - first.sequences) * workload.answer
    ramp_tokens = (first.sequences - batch) * workload.answer
    seconds = first.seconds + steady_tokens / batch * now.seconds
    gaps = [Gap(steady_tokens + ramp_tokens, now.seconds)]
    renewed = min((workload.sequences - batch) / batch, 1.0)
    piece = law.last(batch, renewed) / DRAIN_PIECES
    for index in range(DRAIN_PIECES):
        left = max(batch * law.left((index + 0.5) * piece, renewed), 1.0)
        age = renewed * law.age + (1.0 - renewed) * (index + 0.5) * piece
        step = server.step_s(left, workload.prompt + max(age, (index + 0.5) * piece))
        seconds += piece * step
        gaps.append(Gap(piece * left, step))
    return seconds, gaps
