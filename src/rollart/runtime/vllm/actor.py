"""The engine's actor where vLLM samples: turns out, tokens in, versions applied between the two.

Takes the place of `runtime.engine.actor.EngineActor` behind the same proxy. Invariants: while a version is applied nothing is
under way in vLLM, so every token that comes was sampled under the version that is served then; a turn that an apply ends is
sent again from its tokens (`rebuild`) or answered `aborted`; cached prefixes never outlive the weights that made them. When
vLLM is gone, or answers what cannot be taken in the middle of an apply, the last answer tells the owner why.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, Literal

import numpy as np
from transformers import PretrainedConfig

from rollart.config.engines import VllmEngine
from rollart.config.schema import PretrainedModel, ScratchModel
from rollart.core.errors import EngineError, RollartError, StoreError, failure
from rollart.core.types import (
    Applied,
    EngineBook,
    Failure,
    Fingerprint,
    Finish,
    Generation,
    Manifest,
    Purpose,
    RequestId,
    TurnRequest,
    Version,
)
from rollart.runtime.actors import fetch
from rollart.runtime.answering import Answering
from rollart.runtime.engine.actor import PROGRESS_S, Command, EnginePoll, Forget
from rollart.runtime.models import hf_config
from rollart.runtime.payload import ids_of
from rollart.runtime.probe import prompts
from rollart.runtime.vllm import client, staging
from rollart.runtime.vllm.rows import Computed, Row, refusal, refused_version, wants
from rollart.runtime.vllm.server import ServerSpec, VllmServer
from rollart.runtime.weights import BucketLocation, unpack

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
"""As vLLM names them."""
AGAIN_S = 0.02
"""An abort can overtake the request that it is about, so it is repeated until the request has ended."""
MOST_UNASKED_ABORTS = 3
"""Of one turn; beyond them it would go on for ever."""
CUT_S = 20.0
"""Until everything that was told to end must have ended."""
DYING_S = 3.0
"""A server whose core has died is gone within a second or two."""
GENERATE = "/inference/v1/generate"

MakeServer = Callable[[ServerSpec, PretrainedConfig], VllmServer]


class VllmActor(Answering):
    """An async Ray actor beside one vLLM server."""

    def __init__(
        self, model: ScratchModel | PretrainedModel, vocab_size: int, config: VllmEngine,
        server: MakeServer = VllmServer,
    ) -> None:  # fmt: skip
        super().__init__(beat_s=PROGRESS_S)
        self._config = hf_config(model, vocab_size)
        self._longest = min(
            config.max_model_len or self._config.max_position_embeddings, self._config.max_position_embeddings
        )
        spec = ServerSpec(
            python=config.python, max_live=config.max_live, max_model_len=self._longest, kv_gb=config.kv_gb,
            dtype=DTYPES[config.dtype], threads=config.threads, start_s=config.start_s,
        )  # fmt: skip
        self._server = server(spec, self._config)
        self._rows: dict[RequestId, Row] = {}
        self._computed: dict[tuple[str, int], Computed] = {}
        self._answers: list[tuple[RequestId, Generation]] = []
        self._came_s: dict[RequestId, float] = {}
        self._sampled: dict[Purpose, int] = dict.fromkeys(("train", "eval", "external"), 0)
        self._rebuilt = 0
        self._changed = asyncio.Condition()
        self._version: Version = -1
        self._applying = False
        self._asleep = False
        self._held: tuple[Version, str] = (-1, "")
        """Version and digest of what lies ready."""
        self._prefetching = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> int:
        """Start the server; returns this process's id."""
        await self._server.start()
        staging.remove(self._server.folder)
        self._spawn(self._server.watch(lambda why: self._break(EngineError(why))))
        return os.getpid()

    async def close(self) -> None:
        """End the server in good order: of an actor that is simply killed, shared memory of the server is left."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.to_thread(self._server.stop)

    def end(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        self._server.stop()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _break(self, error: BaseException) -> None:
        """The engine is lost: nothing that it holds can be known any more."""
        self.broke(error)

    # --- commands ------------------------------------------------------------------------------------------------------

    def take_in(self, items: Sequence[Command]) -> None:
        aborts: list[RequestId] = []
        for command in items:
            match command:
                case TurnRequest():
                    self._accept(command)
                case Forget():
                    self._computed.pop((command.traj, command.attempt), None)
                case _:
                    aborts.append(command)
        if ending := [self._rows[one] for one in aborts if one in self._rows]:
            self._abort(ending)

    def take_out(self) -> EnginePoll:
        answers, self._answers = self._answers, []
        live = {id_: row.progress for id_, row in self._rows.items()}
        book = EngineBook(sampled=dict(self._sampled), live=live, rebuilt_tokens=self._rebuilt)
        return EnginePoll.of(answers, book)

    def _accept(self, request: TurnRequest) -> None:
        if request.id in self._rows:
            raise EngineError(f"request {request.id} submitted twice; a re-send needs another `part`")
        computed = self._computed.setdefault((request.id.traj, request.id.attempt), Computed())
        row = Row.of(request, computed)
        self._rows[request.id] = row
        self._came_s[request.id] = time.monotonic()
        why = refusal(request, ids_of(request.context), vocab=self._config.vocab_size, longest=self._longest)
        if why is not None:
            self._answer(row, "failed", why)
        else:
            self._spawn(self._serve(row))

    def _abort(self, rows: list[Row]) -> None:
        for row in rows:
            row.aborting = True
        self._spawn(self._notify())
        if live := [row for row in rows if row.live]:
            self._spawn(self._cut(live))

    async def _cut(self, rows: list[Row]) -> None:
        """End what is under way of these, until it has ended. Breaks the engine when it does not end."""
        deadline = time.monotonic() + CUT_S
        sends = {row.request.id: row.sends for row in rows}
        while left := [row for row in rows if row.live and row.sends == sends[row.request.id]]:
            if time.monotonic() > deadline:
                self._break(EngineError(f"vLLM does not end {left[0].request.id} and {len(left) - 1} more"))
                return
            try:
                await self._server.abort([row.wire_id for row in left])
            except EngineError as error:
                self._break(error)
                return
            await asyncio.sleep(AGAIN_S)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    # --- one turn ------------------------------------------------------------------------------------------------------

    async def _serve(self, row: Row) -> None:
        try:
            while (end := await self._next(row)) is None:
                pass
        except client.ServerGone as error:
            await self._ends_within(DYING_S)
            self._break(EngineError(self._server.ended() or str(error)))
        except (RollartError, AttributeError, LookupError, TypeError, ValueError) as error:
            if await self._ends_within(DYING_S):
                return
            self._answer(row, "failed", failure("engine", "raised", f"{type(error).__name__}: {error}"))
        else:
            self._answer(row, *end)
        await self._notify()

    async def _ends_within(self, limit_s: float) -> bool:
        """Whether the server goes: when its core has died it still answers errors for a while."""
        deadline = time.monotonic() + limit_s
        while not self._server.ended():
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(AGAIN_S)
        return True

    async def _next(self, row: Row) -> tuple[Finish, Failure | None] | None:
        """Wait until the served version may sample this row, then do a part of it. None: another part is to come."""
        request = row.request
        async with self._changed:
            await self._changed.wait_for(
                lambda: (
                    row.aborting
                    or (self._may_send and (wants(request, self._version) or refused_version(request, self._version)))
                )
            )
        if row.aborting:
            return "aborted", None
        if (why := refused_version(request, self._version)) is not None:
            return "failed", why
        return await self._part(row)

    @property
    def _may_send(self) -> bool:
        return not (self._applying or self._asleep)

    async def _part(self, row: Row) -> tuple[Finish, Failure | None] | None:
        """Send what is still wanted and take what comes; under one version, for an apply waits until this has ended."""
        version, finish, broken = self._version, "", None
        row.live = True
        try:
            async for event in client.events(self._server.socket, GENERATE, row.sent()):
                for choice in event.get("choices", ()):
                    content = (choice.get("logprobs") or {}).get("content") or ()
                    ids = choice.get("token_ids") or []
                    broken = broken or row.take(version, ids, [float(one["logprob"]) for one in content])
                    self._sampled[row.request.purpose] += 0 if broken else len(ids)
                    finish = choice.get("finish_reason") or finish
                if event.get("usage"):
                    before = row.rebuilt
                    row.account(version, event["usage"])
                    self._rebuilt += row.rebuilt - before
        finally:
            row.live = False
        if broken is not None:
            return "failed", broken
        match finish:
            case "stop":
                return "stop", None
            case "length":
                return "length", None
            case "abort":
                return ("aborted", None) if row.aborting else await self._again(row)
            case _:
                return "failed", failure("engine", "raised", f"vLLM ended a turn with {finish or 'no reason'}")

    async def _again(self, row: Row) -> tuple[Finish, Failure | None] | None:
        """None: send the row again. What is under way ends for an apply and for sleep; otherwise a few times, with pauses."""
        if not self._may_send:
            return None
        row.unasked_aborts += 1
        if row.unasked_aborts > MOST_UNASKED_ABORTS:
            why = (
                f"vLLM has aborted this turn {row.unasked_aborts} times and nobody asked for it; is it short of memory?"
            )
            return "failed", failure("engine", "raised", why)
        await asyncio.sleep(AGAIN_S)
        return None

    def _answer(self, row: Row, finish: Finish, why: Failure | None = None) -> None:
        if self._rows.pop(row.request.id, None) is not None:
            self.took(time.monotonic() - self._came_s.pop(row.request.id))
            self._answers.append((row.request.id, row.answer(finish, why)))
            self.ring()

    # --- weights -------------------------------------------------------------------------------------------------------

    async def prefetch(self, manifest: Manifest) -> Failure | None:
        """Write a version's tensors where vLLM can read them. `store missing`: the bytes are gone with their trainer."""
        self._check_alive()
        location = manifest.location
        if not isinstance(location, BucketLocation):
            raise EngineError(
                f"version {manifest.version} is at {type(location).__name__}, which this engine cannot read"
            )
        async with self._prefetching:
            if self._held[0] == manifest.version:
                return None
            try:
                buckets = [await fetch(handle) for handle in location.handles]
            except StoreError as error:
                return failure("store", "missing", f"version {manifest.version}: {error}")
            folder = self._server.folder
            self._held = (-1, "")
            await asyncio.to_thread(staging.remove, folder)
            tensors = await asyncio.to_thread(unpack, location.index, buckets)
            try:
                _, digest = await asyncio.to_thread(staging.write, folder, manifest.version, tensors)
            except OSError as error:
                raise EngineError(f"{folder}: {error.strerror}; is shared memory full?") from error
            self._held = (manifest.version, digest)
        return None

    async def apply(self, version: Version, kept: Literal["rebuild", "abort"], pinned_s: float) -> Applied:
        """Serve a version that lies ready. Requests pinned to the served one get `pinned_s` seconds to end first."""
        self._check_alive()
        held, digest = self._held
        if version != held:
            raise EngineError(f"version {version} is not staged (held: {held}); prefetch it first")
        if version <= self._version:
            raise EngineError(f"version {version} cannot follow version {self._version}: version numbers only rise")
        with suppress(TimeoutError):
            async with asyncio.timeout(pinned_s), self._changed:
                await self._changed.wait_for(lambda: not self._pinned())
        started = time.monotonic()
        live = [row for row in self._rows.values() if row.live]
        self._applying = True
        try:
            await self._swap(version, kept)
            served = await self._scores(version)
        except EngineError as error:
            self._break(EngineError(self._server.ended() or f"while version {version} was applied: {error}"))
            raise
        finally:
            self._applying = False
            await self._notify()
        fingerprint = Fingerprint(digest=digest, probe=served)
        exposed_s = time.monotonic() - started if live else 0.0
        return Applied(fingerprint=fingerprint, exposed_s=exposed_s, live_requests=len(live))

    async def _swap(self, version: Version, kept: Literal["rebuild", "abort"]) -> None:
        ending = self._pinned()
        if kept == "abort":
            ending = [row for row in self._rows.values() if row.live or row.ids]
        for row in ending:
            row.aborting = True
        await self._server.pause()
        await self._cut([row for row in self._rows.values() if row.live])
        self._check_alive()
        await self._server.reload(self._server.folder / f"version-{version}")
        await self._server.resume()
        self._version = version
        await asyncio.to_thread(
            staging.remove, self._server.folder, but=self._held[0] if self._held[0] > version else None
        )

    async def sleep(self) -> None:
        """Hold all requests until `wake`. Frees nothing: vLLM keeps its weights and its cache, on a GPU too."""
        self._check_alive()
        self._asleep = True
        await self._cut([row for row in self._rows.values() if row.live])

    async def wake(self) -> None:
        self._check_alive()
        self._asleep = False
        await self._notify()

    async def _scores(self, version: Version) -> tuple[float, ...]:
        asked = prompts(self._config.vocab_size).tolist()
        found = await asyncio.gather(
            *(self._server.score(f"probe/{version}/{at}", ids) for at, ids in enumerate(asked))
        )
        return tuple(float(np.float32(one)) for part in found for one in part)

    def _pinned(self) -> list[Row]:
        return [row for row in self._rows.values() if row.request.pin == self._version and not row.aborting]

    def _check_alive(self) -> None:
        if self._error is not None or (why := self._server.ended()):
            raise EngineError(str(self._error or why))
