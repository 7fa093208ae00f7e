"""A batch workload on one engine in steady state: throughput, time per token, time to the first token.

Owns: how admission, continuous batching, prompts and the end of a burst turn step times into the figures that benchmarks
report. Invariant: all in closed form or a bisection, no event per token or request; an offered rate is never exceeded.
Why: published measurements of engines are of whole workloads, so a step model can only be checked through this.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

from rollart.core.errors import ConfigError
from rollart.perf.engines import EngineFacts
from rollart.perf.inference import EngineCost
from rollart.perf.lengths import Lengths, varied
from rollart.perf.stretches import Round, Stretch, life_s, poisson_quantile, quantile_of, weighted_median

DRAIN_PIECES = 12
"""Pieces in which the end of a burst is integrated."""
PLACES = tuple((place + 0.5) / 24 for place in range(24))
"""Quantiles at which a place in the queue and a length are combined."""
RAMP_PIECES = 6
"""Pieces in which a batch grows that fills as requests come."""
BISECTIONS = 30
FULL_LIVES = 7.0
"""A batch that only just fills does so after this many lives of an answer at the latest."""


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
    shortest: float = 0.0
    """Varied answers that are shorter were left out."""

    def __post_init__(self) -> None:
        for label in ("prompt", "answer", "requests", "rate_per_s", "concurrency"):
            value = getattr(self, label)
            if not value > 0 or (label in ("prompt", "answer") and not math.isfinite(value)):
                raise ConfigError(f"workload: {label} is {value}; give a number above 0")
        if not 0.0 <= self.shortest < self.answer:
            raise ConfigError(
                f"workload: shortest is {self.shortest}; give a number from 0 to below the mean answer of {self.answer}"
            )

    @property
    def law(self) -> Lengths:
        return varied(self.answer, self.prompt, self.shortest) if self.lengths == "varied" else Lengths(self.answer)

    @property
    def sequences(self) -> float:
        return self.requests * self.beams

    @property
    def read_per_sequence(self) -> float:
        """Prompt tokens that are read, and kept, for each sequence."""
        return self.prompt / self.beams


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
    run: tuple[Stretch, ...]
    """From the first request on."""
    saturated: bool
    filled: Ramp
    """Nothing where the requests have no end or the engine keeps up."""

    @property
    def tpot_s(self) -> float:
        """Time per token after the first as serving benchmarks define it: of each request, then the mean over requests."""
        found = self._paces()
        return sum(found) / len(found)

    def tpot_quantile_s(self, quantile: float) -> float:
        """Time per token that so many of the requests stay below."""
        return quantile_of(self._paces(), quantile)

    def _paces(self) -> list[float]:
        """Seconds per token of requests in order, evenly over places in the queue and lengths."""
        if len(self.run) == 1:
            return [self.steady.seconds]
        lengths = [self.workload.law.quantile(place) for place in PLACES]
        starts = [self._start_s(place) for place in PLACES]
        return sorted(life_s(self.run, start, length) / length for start in starts for length in lengths)

    @property
    def mean_itl_s(self) -> float:
        """Mean distance of two deliveries; an engine that visits its scheduler rarely delivers several tokens at once."""
        running = [stretch for stretch in self.run if stretch.rounds]
        seconds = sum(stretch.seconds * stretch.sequences for stretch in running)
        return self.server.facts.steps_per_schedule * seconds / sum(stretch.tokens for stretch in running)

    @property
    def median_itl_s(self) -> float:
        """The distance of two deliveries that half of them stay below: most often of steps that read no prompt."""
        gaps: list[tuple[float, float]] = []
        for stretch in self.run:
            found = self._deliveries(stretch)
            gaps += [(gap, stretch.tokens / len(found)) for gap in found]
        return weighted_median(gaps)

    def _deliveries(self, stretch: Stretch) -> list[float]:
        """Distances of two deliveries, equally likely; how many prompts come between them is a matter of chance."""
        server, w, now = self.server, self.workload, stretch.now
        plain = server.facts.steps_per_schedule * now.plain_s
        if not now.loaded_share:
            return [plain]
        if server.facts.mixed:
            return [plain + (now.loaded_s - now.plain_s) * (place < now.loaded_share) for place in PLACES]
        usual = stretch.sequences * server.facts.steps_per_schedule / (w.answer * w.beams)
        prompts = [poisson_quantile(usual, place) for place in PLACES]
        read = {count: server.step_s(0.0, 0.0, count * w.prompt, w.prompt) for count in set(prompts) - {0}}
        return [plain + read.get(count, 0.0) for count in prompts]

    @property
    def first_wait_s(self) -> float:
        """From arrival to the first token on an engine that keeps up: the step under way, then the prompt's own."""
        w, server = self.workload, self.server
        batch = self.batch if server.facts.mixed else 0.0
        own = server.step_s(batch, server.context(w), w.prompt, w.prompt)
        return own + self.steady.plain_s * server.facts.steps_per_schedule / 2.0

    def ttft_s(self, quantile: float | None = None) -> float:
        """Time to the first token of that quantile of the requests; without one the mean."""
        waits = sorted(map(self._wait_s, PLACES))
        return sum(waits) / len(waits) if quantile is None else quantile_of(waits, quantile)

    def e2e_s(self, quantile: float | None = None) -> float:
        """Time from arrival to the last token; lengths do not depend on the place in the queue."""
        lengths = [self.workload.law.quantile(place) for place in PLACES]
        starts = [(self._start_s(place), self._wait_s(place)) for place in PLACES]
        totals = sorted(wait + life_s(self.run, start, length) for start, wait in starts for length in lengths)
        return sum(totals) / len(totals) if quantile is None else quantile_of(totals, quantile)

    def _wait_s(self, place: float) -> float:
        return max(self._start_s(place) - self._arrival_s(place), 0.0) + self.first_wait_s

    def _arrival_s(self, place: float) -> float:
        w = self.workload
        return place * w.requests / w.rate_per_s if math.isfinite(w.requests) else 0.0

    def _start_s(self, place: float) -> float:
        """Seconds into the run at which the request at that place of the queue, 0 to 1, is admitted."""
        w, arrival = self.workload, self._arrival_s(place)
        if not self.saturated or not math.isfinite(w.requests):
            return arrival
        ahead = place * w.sequences
        if ahead <= self.filled.sequences:
            together = max(self.server.step_tokens / w.read_per_sequence, 1.0)  # prompts of one step answer at its end
            read = min(math.ceil(ahead / together) * together, self.filled.sequences)
            return max(arrival, self.server.read_s(w) * read)
        return self.filled.seconds + (ahead - self.filled.sequences) * w.answer * self.steady.seconds / self.batch


def steady_round(server: Server, workload: Workload, batch: float) -> Round:
    """One token for each of `batch` sequences, with the prompts that keep the batch at this size."""
    context = server.context(workload)
    plain = server.step_s(batch, context)
    owed = batch * workload.read_per_sequence / workload.answer
    if not server.facts.mixed:
        visit = owed * server.facts.steps_per_schedule
        chunk = max(min(visit, server.step_tokens), workload.prompt)
        alone = server.step_s(0.0, 0.0, chunk, workload.prompt)
        return Round(plain + owed / chunk * alone, plain, plain + alone, min(visit / chunk, 1.0))
    room = max(server.step_tokens - batch, 1.0)
    chunk = room if workload.lengths == "fixed" else min(max(owed, min(workload.prompt, room)), room)
    loaded = server.step_s(batch, context, chunk, workload.prompt)
    share = min(owed / chunk, 1.0)
    return Round((1.0 - share) * plain + share * loaded, plain, loaded, share)


def ramp(server: Server, workload: Workload, batch: float, now: Round) -> Ramp:
    """How the first full batch comes together: as fast as prompts are read, or as requests come."""
    read_s = server.read_s(workload) * batch
    if not math.isfinite(workload.rate_per_s):
        return Ramp(read_s, batch)
    arrivals = workload.rate_per_s * workload.beams
    life, law = workload.answer * now.seconds, workload.law
    low, high = 0.0, FULL_LIVES * life
    for _ in range(BISECTIONS):
        middle = (low + high) / 2.0
        full = arrivals * life * (1.0 - law.left(middle / now.seconds, 1.0)) >= batch
        low, high = (low, middle) if full else (middle, high)
    return Ramp(read_s, batch) if high <= read_s else Ramp(high, min(arrivals * high, workload.sequences))


def serve(server: Server, workload: Workload) -> Served:
    """Figures of `workload` on `server`. Raises `ConfigError` if the model does not fit."""
    batch = server.room(workload)
    now = steady_round(server, workload, batch)
    capacity = batch / (workload.answer * workload.beams * now.seconds)
    if workload.rate_per_s < capacity:
        return _keeps_up(server, workload, batch)
    first = Ramp(0.0, 0.0)
    run = [_steadily(workload, batch, now)]
    rate = batch / workload.beams / now.seconds
    if math.isfinite(workload.requests):
        first = ramp(server, workload, batch, now)
        if workload.lengths == "fixed":
            seconds = _waves_s(server, workload, batch, now)
        else:
            run = _burst(server, workload, batch, now, first)
            seconds = sum(stretch.seconds for stretch in run)
        rate = workload.requests * workload.answer / max(seconds, workload.requests / workload.rate_per_s)
    return Served(
        server=server, workload=workload, tokens_per_s=rate, batch=batch, steady=now, run=tuple(run), saturated=True,
        filled=first,
    )  # fmt: skip


def _steadily(workload: Workload, batch: float, now: Round) -> Stretch:
    return Stretch(workload.answer, workload.answer * now.seconds, batch, now)


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
    return Served(
        server=server, workload=workload, tokens_per_s=rate, batch=batch, steady=now,
        run=(_steadily(workload, batch, now),), saturated=False, filled=Ramp(0.0, 0.0),
    )  # fmt: skip


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


def _burst(server: Server, workload: Workload, batch: float, now: Round, first: Ramp) -> list[Stretch]:
    """Varied requests: read the first batch, keep it full, then let it run empty."""
    law = workload.law
    run = _filling(server, workload, batch, now, first)
    rounds = (workload.sequences - first.sequences) * workload.answer / batch
    run.append(Stretch(rounds, rounds * now.seconds, batch, now))
    renewed = min((workload.sequences - batch) / batch, 1.0)
    piece = law.last(batch, renewed) / DRAIN_PIECES
    for index in range(DRAIN_PIECES):
        left = max(batch * law.left((index + 0.5) * piece, renewed), 1.0)
        age = renewed * law.age + (1.0 - renewed) * (index + 0.5) * piece
        step = server.step_s(left, workload.prompt + max(age, (index + 0.5) * piece))
        run.append(Stretch(piece, piece * step, left, Round(step, step, step, 0.0)))
    return run


def _filling(server: Server, workload: Workload, batch: float, now: Round, first: Ramp) -> list[Stretch]:
    """Until the engine is full: of a burst only prompts are read; at a rate the batch grows."""
    if not math.isfinite(workload.rate_per_s):
        return [Stretch(0.0, first.seconds, 0.0, now)]
    arrivals, life = workload.rate_per_s * workload.beams, workload.answer * now.seconds
    found = []
    for index in range(RAMP_PIECES):
        seconds = first.seconds / RAMP_PIECES
        grown = arrivals * life * (1.0 - workload.law.left((index + 0.5) * seconds / now.seconds, 1.0))
        running = min(max(grown, 1.0), batch)
        step = steady_round(server, workload, running)
        found.append(Stretch(seconds / step.seconds, seconds, running, step))
    return found
