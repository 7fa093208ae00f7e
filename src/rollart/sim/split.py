"""An engine in two halves: prompts are read on some workers and answers decoded on others, of another device if need be.

Owns where a request is. It is read on a prefill worker, which samples its first token; the keys and values of what was read
go to a decode worker; there it decodes to its end. Invariants: a request is in one phase at a time; its tokens and its stop
mean what they mean for `Batching`; nothing is decoded before its keys and values are there.

Rules. Both sides keep a prefix between the turns of an attempt: an attempt stays with its pair of workers as long as any of
it is kept, and a turn reads and moves only what is new. A prefill worker has never seen what its partner sampled in the turn
before, so it reads that as well; moved it need not be, it was made there. Idle prefixes take room on decode workers only,
evenly over all of one engine (a prefill worker has all its memory for prefixes and what it reads). A request without kept
prefix goes to the workers with the least to do. Moving overlaps with reading layer by layer: what is left when the last
layer is read is that layer's share, or more where the link has not kept up; a link is one prefill worker's and carries one
request after the other. A decode worker that runs out of cache reads the preempted request again itself.

Source: RollArt (arXiv 2512.22560), prefill/decode disaggregation; moving by layer as in Splitwise and Mooncake.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from rollart.core.errors import ConfigError, InvariantBroken
from rollart.core.types import RequestId
from rollart.sim.batching import Batching, BatchRules, StepCost
from rollart.sim.pace import Stopped, Work
from rollart.sim.prefixes import Prefixes

PAIRS_KEPT = 16384
"""Attempts whose workers are remembered; far more than one engine has live ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvMove:
    """How keys and values go from a prefill worker to decode workers."""

    bytes_per_token: float
    """All layers, all ranks of the worker together."""
    bytes_per_s: float
    """Of one prefill worker's link, all its ranks together; inf: at once."""
    latency_s: float = 0.0
    """Of one request's move."""
    layers: int = 1
    """Pieces in which it overlaps with reading."""

    def __post_init__(self) -> None:
        for name in ("bytes_per_token", "latency_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"{name} of moving a cache is {value}; give a finite number, 0 or more")
        if not self.bytes_per_s > 0 or self.layers < 1:
            raise ConfigError(
                f"moving a cache: bytes_per_s is {self.bytes_per_s} and layers is {self.layers}; give numbers above 0"
            )


@dataclass(slots=True, eq=False)
class _Pair:
    """Who serves an attempt, and what of it the prefill worker has not seen."""

    reader: int
    decoder: int
    unread: int = 0


@dataclass(slots=True, eq=False)
class _Request:
    work: Work
    done: Callable[[], None]
    pair: _Pair
    to_read: int
    started_s: float
    phase: Literal["read", "moved", "decoded", "done"] = "read"
    """What happens to it just now."""
    first: int = 0
    """Tokens that the prefill worker sampled: one, once it has read."""
    reread: int = 0
    timer: asyncio.TimerHandle | None = None


def owner_of(key: Hashable) -> Hashable:
    """Whose prefix a request goes on with: its trajectory's attempt; other keys have none but their own."""
    return (key.traj, key.attempt) if isinstance(key, RequestId) else key


class SplitPace:
    """Implements `pace.Pace` over prefill workers and decode workers."""

    def __init__(self, readers: Sequence[Batching], decoders: Sequence[Batching], move: KvMove) -> None:
        if not readers or not decoders:
            raise ConfigError(
                f"an engine in two halves has {len(readers)} prefill and {len(decoders)} decode workers; "
                "give at least one of each"
            )
        self.readers = tuple(readers)
        self.decoders = tuple(decoders)
        self.moved_bytes = 0.0
        self.exposed_s = 0.0
        """That requests stood still between reading and decoding, in all."""
        self._move = move
        self._in: dict[Hashable, _Request] = {}
        self._pairs: OrderedDict[Hashable, _Pair] = OrderedDict()
        self._to_read = [0] * len(self.readers)
        self._live = [0] * len(self.decoders)
        self._link_free_s = [0.0] * len(self.readers)

    @property
    def preemptions(self) -> int:
        return sum(worker.preemptions for worker in self.decoders)

    def start(self, key: Hashable, work: Work, done: Callable[[], None]) -> None:
        room = self.decoders[0].rules.kv_tokens
        if work.context + work.wanted > room:
            raise InvariantBroken(
                f"{key}: {work.context} tokens of context and {work.wanted} to be sampled have no room in a decode "
                f"worker's cache of {room:g}"
            )
        pair = self._pair(key, work)
        to_read = max(1, min(work.context, work.read + pair.unread))
        now = asyncio.get_running_loop().time()
        request = _Request(work=work, done=done, pair=pair, to_read=to_read, started_s=now)
        self._in[key] = request
        self._to_read[pair.reader] += to_read
        self._live[pair.decoder] += 1
        part = replace(work, read=to_read, wanted=min(1, work.wanted))
        self.readers[pair.reader].start(key, part, partial(self._has_read, key))

    def _pair(self, key: Hashable, work: Work) -> _Pair:
        owner = owner_of(key)
        pair = self._pairs.get(owner)
        if pair is None or work.read >= work.context:
            reader = min(range(len(self.readers)), key=self._to_read.__getitem__)
            decoder = min(range(len(self.decoders)), key=self._live.__getitem__)
            pair = self._pairs[owner] = _Pair(reader, decoder)
            if len(self._pairs) > PAIRS_KEPT:
                self._pairs.popitem(last=False)
        self._pairs.move_to_end(owner)
        return pair

    def _has_read(self, key: Hashable) -> None:
        request = self._in[key]
        self._leave_reader(key, request)
        if request.work.wanted <= 1:
            request.phase = "done"
            request.done()  # it stops the request
            return
        request.phase = "moved"
        loop = asyncio.get_running_loop()
        now, move, reader = loop.time(), self._move, request.pair.reader
        n_bytes = move.bytes_per_token * request.work.read
        whole_s = n_bytes / move.bytes_per_s
        # the link began with the first layer at the earliest when the request came
        free_s = max(self._link_free_s[reader], request.started_s) + whole_s
        self._link_free_s[reader] = free_s
        ready_s = max(now + whole_s / move.layers, free_s) + move.latency_s
        self.moved_bytes += n_bytes
        self.exposed_s += ready_s - now
        if ready_s > now:
            request.timer = loop.call_at(ready_s, self._has_moved, key)
        else:
            self._has_moved(key)

    def _leave_reader(self, key: Hashable, request: _Request) -> int:
        """Returns what is left to be read of it."""
        stopped = self.readers[request.pair.reader].stop(key)
        request.first, request.reread = stopped.tokens, stopped.reread
        self._to_read[request.pair.reader] -= request.to_read
        return stopped.unread

    def _has_moved(self, key: Hashable) -> None:
        """The first token is the last that the decode worker has no keys and values of: its first step reads it."""
        request = self._in[key]
        request.timer = None
        request.phase = "decoded"
        work = request.work
        rest = replace(work, read=1, context=work.context + request.first, wanted=work.wanted - request.first)
        self.decoders[request.pair.decoder].start(key, rest, request.done)

    def tokens(self, key: Hashable) -> int:
        request = self._in.get(key)
        if request is None:
            return 0
        if request.phase == "decoded":
            return request.first + self.decoders[request.pair.decoder].tokens(key)
        return request.first

    def stop(self, key: Hashable) -> Stopped:
        request = self._in.get(key)
        if request is None:
            return Stopped(0)
        unread, rest = 0, Stopped(0)
        if request.phase == "read":
            unread = min(request.work.read, self._leave_reader(key, request))
        else:
            request.pair.unread = 0
        if request.phase == "decoded":
            rest = self.decoders[request.pair.decoder].stop(key)
            unread = rest.unread
        tokens, reread = request.first + rest.tokens, request.reread + rest.reread
        if request.timer is not None:
            request.timer.cancel()
        del self._in[key]
        self._live[request.pair.decoder] -= 1
        request.pair.unread += tokens
        return Stopped(tokens, reread, unread)


def split_pace(
    *, read_cost: StepCost, read_rules: BatchRules, readers: int, decode_cost: StepCost, decode_rules: BatchRules,
    decoders: int, move: KvMove, prefixes: Prefixes | None = None,
) -> SplitPace:  # fmt: skip
    """One engine of `readers` prefill and `decoders` decode workers; costs and rules are of one worker each.

    `prefixes` are the engine's: each decode worker holds an equal part of those that are idle.
    """

    def idle() -> float:
        return prefixes.idle_tokens / decoders if prefixes is not None else 0.0

    def evict(tokens: float) -> float:
        return prefixes.evict(tokens * decoders) / decoders if prefixes is not None else 0.0

    rules = replace(decode_rules, mixed=True)
    return SplitPace(
        [Batching(read_cost, read_rules) for _ in range(readers)],
        [Batching(decode_cost, rules, evict=evict, idle=idle) for _ in range(decoders)],
        move,
    )
