"""The engine's process: one loop that steps the engine, and takes commands between steps.

Invariant: a command never interrupts a step, and no step runs while weights are applied; so a command waits for one step
at most (RollArt M3), and live requests stand still exactly as long as `Applied.exposed_s` says: new weights are unpacked in
a thread and laid out in pieces between steps, and once they are served large ones are hashed in a thread beside the steps.
While they are, no other version is served, so nothing is written where they lie: fetching writes beside what is served.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rollart.config.schema import EngineConfig, PretrainedModel, ScratchModel
from rollart.core.errors import EngineError, StoreError, failure
from rollart.core.types import (
    Applied,
    EngineBook,
    Failure,
    Fingerprint,
    Generation,
    Manifest,
    RequestId,
    Sampling,
    Segment,
    Tokens,
    TrajId,
    TurnRequest,
    Version,
)
from rollart.runtime.actors import fetch
from rollart.runtime.answering import Answering
from rollart.runtime.encoding import builder, decoded, encoded
from rollart.runtime.engine.books import with_live
from rollart.runtime.engine.core import EngineCore
from rollart.runtime.models import hf_config
from rollart.runtime.payload import TokenPayload, ids_of
from rollart.runtime.weights import BucketLocation, fingerprint, unpack
from rollart.sched.precedence import ENGINE_NICENESS

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PROGRESS_S = 0.1
"""An engine answers at least this often: control aborts what can no longer be trained by what it knows of live requests."""
PIECE_BYTES = 16 << 20
"""Of new weights, laid out between two steps: a few milliseconds of copying, less than a step. Weights of no more are also
hashed between two steps: a thread would cost as much."""


class Forget(NamedTuple):
    """Nothing more comes for this attempt."""

    traj: TrajId
    attempt: int


Command = TurnRequest | RequestId | Forget
"""Sample this; abort that; free the cache of a third."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePoll:
    """One answer: turns that have ended, and the engine's book as of that instant."""

    answers: tuple[tuple[RequestId, Generation], ...]
    totals: EngineBook
    """Without the live requests."""
    live: bytes
    """Those, encoded: they are in every answer, and looked at in few."""
    work: tuple[float, ...] = ()
    """Since the start: steps, rows, tokens, context of `slots.Work`, and the CPU seconds of the steps."""

    @classmethod
    def of(
        cls, answers: Sequence[tuple[RequestId, Generation]], book: EngineBook, work: tuple[float, ...] = ()
    ) -> EnginePoll:
        rows = tuple((*rid, one.n_tokens, one.oldest_version) for rid, one in book.live.items())
        return cls(answers=tuple(answers), totals=replace(book, live={}), live=encoded(rows), work=work)

    def book(self) -> EngineBook:
        return with_live(self.totals, decoded(self.live))


class EngineActor(Answering):
    """An async Ray actor around `EngineCore`."""

    def __init__(
        self, model: ScratchModel | PretrainedModel, vocab_size: int, config: EngineConfig, alone: bool = False
    ) -> None:
        """`alone`: in its process, which may stand back behind others."""
        super().__init__(beat_s=PROGRESS_S)
        self._alone = alone
        torch.set_num_threads(config.threads)
        self._core = EngineCore(
            hf_config(model, vocab_size),
            max_live=config.max_live,
            kv_tokens=config.kv_tokens,
            prefill_tokens=config.prefill_tokens,
            share_prefixes=config.share_prefixes,
            path=config.path,
            native=config.native,
            dtype=DTYPES[config.dtype],
            device=_device(config.device),
        )
        self._answers: list[tuple[RequestId, Generation]] = []
        self._came_s: dict[RequestId, float] = {}
        self._work = asyncio.Event()
        self._ended = asyncio.Event()
        self._held: Version = -1
        self._cast: tuple[str, str] | None = None
        """Digests of the held version as it was handed over and as it was laid out; None where the two are the same."""
        self._held_bytes = 0
        self._prefetching, self._swapping = asyncio.Lock(), asyncio.Lock()
        self._stepping: asyncio.Task[None] | None = None
        self._step_cpu_s = 0.0

    async def start(self) -> int:
        """Begin to step; returns the process id, by which the owner can find what is left of this engine."""
        if self._alone:
            os.nice(ENGINE_NICENESS)  # of this thread, which steps, and of those that torch starts from it
        self._stepping = asyncio.get_running_loop().create_task(self._steps())
        return os.getpid()

    def lacks(self) -> str:
        """Why decoding has to do without the compiled kernel, where this machine could have it; empty: it need not."""
        return self._core.lacks

    def end(self) -> None:
        """Stop stepping, where the actor has no process that ends."""
        if self._stepping is not None:
            self._stepping.cancel()

    async def _steps(self) -> None:
        try:
            while True:
                if not self._core.has_work:
                    self._work.clear()
                    await self._work.wait()
                    continue
                began_s = time.thread_time()
                answers = self._core.step()
                self._step_cpu_s += time.thread_time() - began_s
                self._collect(answers)
                self.tend()
                await asyncio.sleep(0)
        # boundary: a step that broke, however, has lost the engine's state; the last answer tells the owner why
        except Exception as error:  # noqa: BLE001
            self.broke(error)

    def _collect(self, answers: Sequence[tuple[RequestId, Generation]]) -> None:
        if answers:
            now_s = time.monotonic()
            for rid, _ in answers:
                self.took(now_s - self._came_s.pop(rid, now_s))
            self._answers.extend(answers)
            self.ring()
            self._ended.set()

    def take_in(self, items: Sequence[Command]) -> None:
        requests: list[TurnRequest] = []
        aborts: list[RequestId] = []
        for command in items:
            match command:
                case TurnRequest():
                    requests.append(command)
                case Forget():
                    self._core.forget(command.traj, command.attempt)
                case _:
                    aborts.append(command)
        self._came_s.update(dict.fromkeys((one.id for one in requests), time.monotonic()))
        self._core.submit(requests)
        self._core.abort(aborts)
        self._work.set()

    def take_out(self) -> EnginePoll:
        answers, self._answers = self._answers, []
        done = self._core.work
        work = (done.steps, done.rows, done.tokens, done.context, round(self._step_cpu_s, 6))
        live = encoded(self._core.progress())
        return EnginePoll(answers=tuple(answers), totals=self._core.totals(), live=live, work=work)

    async def prefetch(self, manifest: Manifest) -> Failure | None:
        """Fetch a version's buckets, one call each, and lay its tensors out beside those served.

        A version that is not to be had any more is a failure of the store, and changes nothing here.
        """
        location = manifest.location
        if not isinstance(location, BucketLocation):
            raise EngineError(
                f"version {manifest.version} is at {type(location).__name__}, which this engine cannot read"
            )
        async with self._prefetching:
            try:
                buckets = [await fetch(handle) for handle in location.handles]
            except StoreError as error:
                return failure("store", "missing", f"version {manifest.version}: {error}")
            tensors = await asyncio.to_thread(unpack, location.index, buckets)
            self._held = -1
            for piece in _pieces(tensors):
                self._core.stage(manifest.version, piece)
                await asyncio.sleep(0)
            self._cast, self._held_bytes = None, sum(tensor.nbytes for tensor in tensors.values())
            if any(tensor.dtype != self._core.dtype for tensor in tensors.values()):
                handed = await asyncio.to_thread(fingerprint, tensors)
                self._cast = handed, await asyncio.to_thread(self._core.staged_fingerprint)
            self._held = manifest.version
        return None

    async def apply(self, version: Version, kept: Literal["rebuild", "abort"], pinned_s: float) -> Applied:
        """Serve a staged version. Requests pinned to the served one get `pinned_s` seconds to end first."""
        if version != self._held:
            raise EngineError(f"version {version} is not staged (held: {self._held}); prefetch it first")
        deadline = time.monotonic() + pinned_s
        while self._core.pinned_live() and time.monotonic() < deadline:
            self._ended.clear()
            try:
                async with asyncio.timeout(deadline - time.monotonic()):
                    await self._ended.wait()
            except TimeoutError:
                break
        async with self._swapping:
            cast, aside = self._cast, self._held_bytes > PIECE_BYTES
            started = time.monotonic()
            live = self._core.live_count
            # nothing here awaits, so no step comes in between
            self._collect(self._core.abort_pinned())
            self._collect(self._core.apply(version, kept=kept))
            digest = "" if aside else self._core.fingerprint()
            self._work.set()
            exposed_s = time.monotonic() - started if live else 0.0
            if aside:
                digest = await asyncio.to_thread(self._core.fingerprint)
        known = Fingerprint(digest=_handed(digest, cast))
        return Applied(fingerprint=known, exposed_s=exposed_s, live_requests=live)

    async def sleep(self) -> None:
        """Give memory back between two steps; requests are held until `wake`."""
        async with self._swapping:
            self._core.sleep()
        self._work.set()

    async def wake(self) -> None:
        async with self._swapping:
            self._core.wake()
        self._work.set()


def _handed(live: str, cast: tuple[str, str] | None) -> str:
    """The fingerprint of what is served, given that of the memory that the forward pass reads.

    Where the engine's dtype is the trainer's this is the digest of that memory. Where tensors were cast it is the digest
    of what was handed over, provided that the memory is bit for bit what the cast had made of it; otherwise the memory's
    own, which no trainer has published. So a flipped bit is found either way.
    """
    handed, laid_out = cast or ("", "")
    return handed if live == laid_out else live


def _device(wanted: str) -> torch.device:
    if wanted == "cuda" and not torch.cuda.is_available():
        raise EngineError("engine.device=cuda, but torch finds no CUDA device in this process; use engine.device=cpu")
    return torch.device(wanted)


def _pieces(tensors: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """The tensors in order, in pieces of `PIECE_BYTES` or one tensor."""
    piece: dict[str, Tensor] = {}
    n_bytes = 0
    for name, tensor in tensors.items():
        if piece and n_bytes + tensor.nbytes > PIECE_BYTES:
            yield piece
            piece, n_bytes = {}, 0
        piece[name] = tensor
        n_bytes += tensor.nbytes
    if piece:
        yield piece


# --- how requests travel -------------------------------------------------------------------------------------------------


class Flat:
    """A request as plain values, which is a request again where it is decoded."""

    __slots__ = ("_values",)

    def __init__(self, values: tuple[object, ...]) -> None:
        self._values = values

    def __reduce__(self) -> tuple[Callable[..., TurnRequest], tuple[object, ...]]:
        return _asked, self._values


def flat(request: TurnRequest) -> Flat:
    """The request with its context as one piece: what an engine needs, and much less to send."""
    ids = ids_of(request.context)
    return Flat((tuple(request.id), ids.tobytes(), ids.dtype.str, _sampling_of(request.sampling), *_others_of(request)))


def _asked(
    rid: tuple[TrajId, int, int, int], data: bytes, dtype: str, sampling: tuple[Any, ...], *others: Any
) -> TurnRequest:
    ids = np.frombuffer(data, dtype)
    context = _segment((_tokens(len(ids), (), _payload(ids, None, None)),), None, 0, len(ids))
    request: TurnRequest = _request(RequestId(*rid), context, _sampling(*sampling), *others)
    return request


_SHOWN = ("id", "context", "sampling")
_sampling_of = attrgetter(*(field.name for field in fields(Sampling)))
_others_of = attrgetter(*(field.name for field in fields(TurnRequest) if field.name not in _SHOWN))
_request = builder(TurnRequest, first=_SHOWN)
_segment, _tokens, _payload, _sampling = builder(Segment), builder(Tokens), builder(TokenPayload), builder(Sampling)
