"""Continuous batching on one simulated engine: all its requests share each step, and each step's length is asked of a cost.

Owns who is in the batch: waiting, being read (prefill), decoding. Between two events the batch is a fluid: every decoding
request gains a token per step, prompts are read at the rate of their chunk, and the step takes what the cost says of batch,
mean context and chunk. So an event is a turn's end, a set of prompts that was read, a full cache, or contexts that have grown
enough to change the rate; never a token. Invariants: what live requests hold is never more than the cache's tokens; a
request that must make room (the youngest of the lowest priority first) is read again, all of it, before it goes on.

A cost is anything with `step_s` (`perf.EngineCost`, or a table). Requests that come in one instant are read together.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Protocol

from rollart.core.errors import InvariantBroken
from rollart.sim.pace import ROUNDING, Stopped, Work

REVIEW = 0.1
"""The rate is asked anew when contexts have grown by this share; attention is only a part of a step."""
REVIEW_TOKENS = 64
"""And not before this many tokens, or short contexts would be reviewed at every step."""
FINE, CHUNK, COARSE = 1.05, 1.1, 1.25
"""Costs are asked for amounts on geometric grids, as most steps are like others: contexts of steps that only decode on the fine
one; of steps that read a prompt its chunk on the middle one, and all else, which is the lesser part, on the coarse one."""
PLACES = 512
"""Of a grid: more than any amount needs."""
EXACT = 4
"""So many decoding requests, and fewer, are never rounded."""


class StepCost(Protocol):
    """Seconds of one step of an engine, all of its ranks together. Asked at each event: one that is dear to compute
    remembers what it has said, for all engines alike."""

    def step_s(self, batch: float, context: float, *, prefill: float = 0.0, prefill_context: float = 0.0) -> float: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRules:
    """What an engine puts together in a step."""

    max_live: int
    """Requests decoded or read at once."""
    step_tokens: int
    """Tokens of a step: one per decoding request, the rest for prompts."""
    kv_tokens: float
    """Tokens of cache for live requests and idle ones together."""
    mixed: bool = True
    """Prompts are read in steps that also decode; else decoding stands still meanwhile."""


@dataclass(slots=True, eq=False)
class _Sequence:
    key: Hashable
    work: Work
    done: Callable[[], None]
    order: int
    to_read: int
    sampled: float = 0.0
    """Before it was last taken into the batch."""
    since: float = math.nan
    """The batch's count when it began to decode; not a number while it does not."""
    end: float = math.nan
    """The batch's count at which it has all; an entry of the heap with another one is of before a preemption."""
    reread: int = 0
    again: bool = False
    """It was preempted, and what is to be read was computed before."""

    @property
    def decoding(self) -> bool:
        return self.since == self.since


@dataclass(slots=True)
class _Reading:
    """Prompts that are read together, and what is left of them."""

    sequences: list[_Sequence]
    chunk: float
    """Tokens a step."""
    context: float
    """Tokens that one of theirs attends to on average."""
    left: float
    held: int
    """Tokens that they will hold when they have been read."""


@dataclass(slots=True, eq=False)
class Batching:
    """Implements `pace.Pace`. `evict(tokens)` frees at most so many tokens of idle cache and returns how many; `idle()`
    counts them."""

    cost: StepCost
    rules: BatchRules
    evict: Callable[[float], float] = field(default=lambda tokens: 0.0)
    idle: Callable[[], float] = field(default=lambda: 0.0)
    busy_s: float = 0.0
    """Time in which it had work."""
    preemptions: int = 0
    _in: dict[Hashable, _Sequence] = field(default_factory=dict)
    _waiting: deque[_Sequence] = field(default_factory=deque)
    _reading: _Reading | None = None
    _decoding: dict[_Sequence, None] = field(default_factory=dict)
    _ends: list[tuple[float, int, _Sequence]] = field(default_factory=list)
    """Heap over the count at which a sequence has all its tokens; those that left early are in it still."""
    _count: float = 0.0
    """Tokens that a sequence which decoded all the time has gained."""
    _held: float = 0.0
    """Tokens of cache that live sequences hold, those being read with all that they will have read."""
    _at_s: float = 0.0
    _step_s: float = 0.0
    _arrivals: int = 0
    _timer: asyncio.TimerHandle | None = None
    _settling: bool = False
    _loop: asyncio.AbstractEventLoop | None = None

    # --- the port ----------------------------------------------------------------------------------------------------

    def start(self, key: Hashable, work: Work, done: Callable[[], None]) -> None:
        if work.context + work.wanted > self.rules.kv_tokens:
            raise InvariantBroken(
                f"{key}: {work.context} tokens of context and {work.wanted} to be sampled have no room in a cache of "
                f"{self.rules.kv_tokens:g}"
            )
        self._arrivals += 1
        sequence = _Sequence(key, work, done, self._arrivals, max(1, work.read))
        self._in[key] = sequence
        self._queue(sequence)
        self._settle_soon()

    def tokens(self, key: Hashable) -> int:
        sequence = self._in.get(key)
        if sequence is None:
            return 0
        self._advance()
        return self._tokens(sequence)

    def stop(self, key: Hashable) -> Stopped:
        sequence = self._in.pop(key, None)
        if sequence is None:
            return Stopped(0)
        self._advance()
        tokens, unread = self._tokens(sequence), self._unread(sequence)
        self._take_out(sequence)
        self._settle_soon()
        reread = sequence.reread + (sequence.to_read - unread if sequence.again else 0)
        return Stopped(tokens, reread, min(unread, sequence.to_read if sequence.again else sequence.work.read))

    # --- time --------------------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Bring the fluid to now."""
        now = self._running().time()
        elapsed, self._at_s = now - self._at_s, now
        if elapsed <= 0 or not self._step_s:
            return
        steps = elapsed / self._step_s
        self.busy_s += elapsed
        if self._reading is not None:
            self._reading.left -= steps * self._reading.chunk
        if self._decoding and (self._reading is None or self.rules.mixed):
            self._count += steps
            self._held += steps * len(self._decoding)

    def _settle_soon(self) -> None:
        """Whatever comes and goes in this instant is put together once, after all of it."""
        if not self._settling:
            self._settling = True
            self._running().call_soon(self._settle)

    def _running(self) -> asyncio.AbstractEventLoop:
        """The loop that it lives in."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        return self._loop

    def _settle(self) -> None:
        """Let in whom there is room for, ask the cost, and set the time of the next event."""
        self._advance()
        self._finish_reading()
        self._settling = True
        if self._ends and self._ends[0][0] <= self._count + ROUNDING:
            for sequence in self._finished():
                sequence.done()  # it stops the sequence
        self._settling = False
        self._make_room()
        self._admit()
        self._set_timer()

    def _finished(self) -> list[_Sequence]:
        ended = []
        while self._ends and self._ends[0][0] <= self._count + ROUNDING:
            end, _, sequence = heapq.heappop(self._ends)
            if sequence.decoding and sequence.end == end:
                # a sequence that was preempted and read again within one step is in the heap with the same end twice
                sequence.end = math.nan
                ended.append(sequence)
        return ended

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        decoding, reading = len(self._decoding), self._reading
        if not decoding and reading is None:
            self._step_s = 0.0
            return
        decodes = decoding if reading is None or self.rules.mixed else 0
        context = self._mean_context() if decodes else 0.0
        steps = math.inf
        if reading is None:
            self._step_s = self.cost.step_s(decodes, _FINE.near(context))
        else:
            self._step_s = self.cost.step_s(
                decodes if decodes <= EXACT else round(_COARSE.near(decodes)), _COARSE.near(context),
                prefill=_CHUNK.near(reading.chunk), prefill_context=_COARSE.near(reading.context),
            )  # fmt: skip
            steps = reading.left / reading.chunk
        if decodes:
            while not (self._ends[0][2].decoding and self._ends[0][2].end == self._ends[0][0]):
                heapq.heappop(self._ends)
            room = max(self.rules.kv_tokens - self._held - self.idle(), 0.0) / decodes
            steps = min(steps, self._ends[0][0] - self._count, max(REVIEW_TOKENS, REVIEW * context), room)
        self._timer = self._running().call_at(self._at_s + max(steps, 0.0) * self._step_s, self._settle)

    def _mean_context(self) -> float:
        reading = 0 if self._reading is None else self._reading.held
        return max(1.0, (self._held - reading) / len(self._decoding))

    # --- the batch ---------------------------------------------------------------------------------------------------

    def _tokens(self, sequence: _Sequence) -> int:
        own = sequence.sampled + (self._count - sequence.since if sequence.decoding else 0.0)
        return min(sequence.work.wanted, int(own + 2 * ROUNDING))  # whoever has ended has all

    def _queue(self, sequence: _Sequence) -> None:
        """Higher priority first, then first come; nearly always that is the end."""
        place = len(self._waiting)
        if not place:
            self._waiting.append(sequence)
            return
        key = (-sequence.work.priority, sequence.order)
        while place and (-self._waiting[place - 1].work.priority, self._waiting[place - 1].order) > key:
            place -= 1
        self._waiting.insert(place, sequence)

    def _admit(self) -> None:
        """Take the next prompts, as many as one step reads, or the first one in several steps."""
        if self._reading is not None or not self._waiting:
            return
        budget = self.rules.step_tokens - (len(self._decoding) if self.rules.mixed else 0)
        taken: list[_Sequence] = []
        total = 0
        while self._waiting and len(self._decoding) + len(taken) < self.rules.max_live:
            sequence = self._waiting[0]
            if taken and total + sequence.to_read > budget:
                break
            need = _whole(sequence) + 1
            lacking = self._held + self.idle() + need - self.rules.kv_tokens
            if lacking > 0 and self.evict(lacking) < lacking:
                break
            self._waiting.popleft()
            self._held += _whole(sequence)
            taken.append(sequence)
            total += sequence.to_read
        if taken:
            steps = max(1, math.ceil(total / max(1, budget)))
            seen = sum(
                sequence.to_read * (_whole(sequence) - sequence.to_read / 2) for sequence in taken
            ) / total  # fmt: skip
            self._reading = _Reading(taken, total / steps, seen, float(total), sum(map(_whole, taken)))

    def _finish_reading(self) -> None:
        """Prompts that are read have their first token, and decode."""
        reading = self._reading
        if reading is None or reading.left > ROUNDING * max(1.0, reading.chunk):
            return
        self._reading = None
        for sequence in reading.sequences:
            if self._in.get(sequence.key) is not sequence:
                continue
            if sequence.again:
                sequence.reread += sequence.to_read
            sequence.to_read, sequence.again = 0, False
            sequence.sampled += 1.0
            sequence.since = self._count
            self._held += 1.0
            self._decoding[sequence] = None
            sequence.end = self._count + sequence.work.wanted - sequence.sampled
            heapq.heappush(self._ends, (sequence.end, sequence.order, sequence))

    def _make_room(self) -> None:
        """Idle cache goes first, then the youngest of the lowest priority, until the rest can have a token more."""
        while True:
            lacking = self._held + len(self._decoding) - self.rules.kv_tokens
            over = lacking + REVIEW_TOKENS * len(self._decoding) + self.idle()
            if over > 0:
                self.evict(over)
            if lacking <= ROUNDING:
                return
            live = [*self._decoding, *(self._reading.sequences if self._reading else ())]
            if len(live) <= 1:
                return
            self._preempt(max(live, key=lambda sequence: (-sequence.work.priority, sequence.order)))

    def _preempt(self, sequence: _Sequence) -> None:
        own, decoded = self._tokens(sequence), sequence.decoding
        self._take_out(sequence)
        self._queue(sequence)
        if decoded:
            sequence.sampled, sequence.since = float(own), math.nan
            sequence.to_read, sequence.again = _whole(sequence), True
            self.preemptions += 1

    def _take_out(self, sequence: _Sequence) -> None:
        if sequence.decoding:
            self._held -= sequence.work.context + sequence.sampled + self._count - sequence.since
            sequence.end = math.nan
            del self._decoding[sequence]
            return
        reading = self._reading
        if reading is None or sequence not in reading.sequences:
            self._waiting.remove(sequence)
            return
        reading.left = max(0.0, reading.left - self._unread(sequence))
        reading.sequences.remove(sequence)
        reading.held -= _whole(sequence)
        self._held -= _whole(sequence)
        if not reading.sequences:
            self._reading = None

    def _unread(self, sequence: _Sequence) -> int:
        """Of what it has to read, what is not read yet: prompts that are read together are read one after another."""
        reading = self._reading
        if reading is None or sequence not in reading.sequences:
            return sequence.to_read
        place = reading.sequences.index(sequence)
        behind = sum(other.to_read for other in reading.sequences[place + 1 :])
        return min(sequence.to_read, max(0, math.ceil(reading.left - behind - ROUNDING * max(1.0, reading.chunk))))


def _whole(sequence: _Sequence) -> int:
    """Tokens that it holds when it has been read."""
    return sequence.work.context + int(sequence.sampled)


class _Grid:
    """Amounts a factor apart."""

    __slots__ = ("_amounts", "_per_e")

    def __init__(self, factor: float) -> None:
        self._amounts = tuple(factor**place for place in range(PLACES))
        self._per_e = 1.0 / math.log(factor)

    def near(self, amount: float) -> float:
        """The nearest amount; none stays none."""
        if amount <= 1.0:
            return 1.0 if amount > 0.0 else 0.0
        return self._amounts[round(math.log(amount) * self._per_e)]


_FINE, _CHUNK, _COARSE = _Grid(FINE), _Grid(CHUNK), _Grid(COARSE)
