"""How actors are started, called and ended: in processes of a Ray cluster, or inside this process.

Owns the difference between the two; everything above it calls `handle.method.remote(..)` and awaits the outcome through
`call`. Invariant: a call to an actor that is gone, or that raises, comes back as a Failure with its cause and never hangs.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import re
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from rollart.config.schema import LocalWorld
from rollart.core.errors import ClusterError, StoreError
from rollart.core.types import Boundary, Failure
from rollart.runtime.reap import Label

DETAIL_CHARS = 400
"""Characters of a dead actor's story that a failure keeps; Ray tells it at length."""
FETCH_S = 30.0
"""Longest wait for one array: Ray tells within a second that the process which put it is gone; this is for when it does not."""


class Actors(Protocol):
    """Starts and ends actors of one kind."""

    def start(self, cls: type, *args: object) -> Any:
        """A handle. What goes wrong in the actor's constructor comes out of its first call."""
        ...

    def kill(self, handle: Any) -> None:
        """End an actor at once. Idempotent."""
        ...

    @property
    def put(self) -> Callable[[Any], Any]:
        """How an actor hands a large array to others: gives what `fetch` reads. Can be sent to an actor."""
        ...

    @property
    def sockets(self) -> Path | None:
        """Where wires to these actors may have sockets (see `wire.Wire`)."""
        ...


async def fetch(handle: Any, *, limit_s: float = FETCH_S) -> Any:
    """The array behind what `put` gave. Raises StoreError when it is not to be had: it goes with the actor that put it."""
    if not inspect.isawaitable(handle):
        return handle
    try:
        async with asyncio.timeout(limit_s):
            return await handle
    except _lost_arrays() as error:
        raise StoreError(f"an array is gone, and so is what put it: {type(error).__name__}") from error
    except TimeoutError as error:
        raise StoreError(f"an array did not come within {limit_s:g} s") from error


async def call(where: Boundary, ref: Any) -> Any | Failure:
    """Await one call to an actor."""
    try:
        return await ref
    except (_Gone, _Raised) as error:
        return _failure_of(where, error)
    except _ray_errors() as error:
        return _failure_of(where, error)


def unless_done(where: Boundary, ref: Any, told: Callable[[Failure], None]) -> None:
    """Let a call run that nobody awaits; `told`, in this loop, if it fails. Until then it costs the loop nothing more."""
    loop = asyncio.get_running_loop()

    def done(future: Any) -> None:
        error = None if future.cancelled() else future.exception()
        if error is not None:
            # Ray completes its futures in a thread of its own, and may do so after this loop has ended
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(told, _failure_of(where, error))

    (ref if isinstance(ref, asyncio.Future) else ref.future()).add_done_callback(done)


def _failure_of(where: Boundary, error: BaseException) -> Failure:
    if isinstance(error, _Gone):
        return Failure(where=where, kind="lost", retryable=True, detail=str(error))
    # what the actor's code raised; Ray's errors without one say that the actor is gone
    cause = getattr(error, "cause", None)
    kind = "lost" if cause is None and isinstance(error, _ray_errors()) else "raised"
    told = error if cause is None else cause
    words = in_words(str(told))[:DETAIL_CHARS] if isinstance(told, _ray_errors()) else str(told)
    return Failure(where=where, kind=kind, retryable=True, detail=f"{type(told).__name__}: {words}")


_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_TRACEBACK = re.compile(r'.*^\s+File "[^\n]*(?:\n[ \t]+[^\n]*)*\n(?=\S)', re.DOTALL | re.MULTILINE)
"""Everything up to the exception's own lines."""
_FIELDS = re.compile(
    r"\b(?:(?:actor|node|worker|job|task|object)[ _]id|class_name|namespace|name|repr|pid|ip|id)\s*[:=]\s*[^\s,;)]*",
    re.I,
)
_IDS = re.compile(
    r"\b(?:0x)?[0-9a-f]{16,}\b|\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b|\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b"
)


def in_words(text: str) -> str:
    """Ray's account of an error on one line, without processes, addresses and ids, which differ from run to run.

    An error in an actor's constructor comes with its traceback, of which the exception is kept.
    """
    text = _TRACEBACK.sub("", _COLOURS.sub("", text))
    text = " ".join(_IDS.sub("", _FIELDS.sub("", text)).split())
    text = re.sub(r"(?<=\()[\s,:]+", "", text)
    return re.sub(r"\s+(?=[.,:;)])", "", re.sub(r"\s*\(\)", "", text))


def _ray_errors() -> tuple[type[Exception], ...]:
    """Ray's errors, if this process uses Ray."""
    import sys

    ray = sys.modules.get("ray")
    return () if ray is None else (ray.exceptions.RayError,)


def _lost_arrays() -> tuple[type[Exception], ...]:
    """What Ray raises for an object that is gone, its owner's death included."""
    import sys

    ray = sys.modules.get("ray")
    return () if ray is None else (ray.exceptions.ObjectLostError,)


# --- Ray -----------------------------------------------------------------------------------------------------------------


def _ray_put(value: Any) -> Any:
    import ray

    return ray.put(value)


class RayActors:
    """Actors in processes of their own. They take no core of Ray's count: all roles share this machine."""

    put = staticmethod(_ray_put)

    def __init__(self, sockets: Path | None = None) -> None:
        self.sockets = sockets

    def start(self, cls: type, *args: object) -> Any:
        import ray

        return ray.remote(cls).options(num_cpus=0, max_restarts=0).remote(*args)

    def kill(self, handle: Any) -> None:
        import ray

        ray.kill(handle, no_restart=True)


def start_ray(world: LocalWorld, *, namespace: str, label: Label | None = None) -> None:
    """Start a Ray cluster for this process alone; `stop_ray` ends it and all its processes.

    `label`: notes the processes and gives the folder of Ray's files, so that both go with the run. Raises
    ClusterError when it does not come up.
    """
    import ray

    try:
        ray.init(
            address="local",
            namespace=namespace,
            include_dashboard=False,
            object_store_memory=world.object_store_mb << 20,
            log_to_driver=False,
            logging_level=logging.ERROR,
            configure_logging=False,
            _temp_dir=None if label is None else str(label.ray_folder),
        )
    # boundary: what Ray raises when it does not come up, a bare Exception among it when its processes are too slow
    except Exception as error:
        raise ClusterError(f"Ray did not start: {error}; where the machine is overloaded, try again") from error
    if label is not None:
        label.look()


def stop_ray() -> None:
    """Idempotent."""
    import ray

    ray.shutdown()


# --- this process --------------------------------------------------------------------------------------------------------


class _Gone(Exception):
    """The actor was ended."""


class _Raised(Exception):
    """The actor's code raised `cause`."""

    def __init__(self, cause: BaseException) -> None:
        self.cause = cause
        super().__init__(str(cause))


def _itself(value: Any) -> Any:
    return value


class InlineActors:
    """Actors in this process, on this loop: nothing overlaps, everything can be stepped through in a debugger."""

    put = staticmethod(_itself)
    sockets: Path | None = None

    def start(self, cls: type, *args: object) -> InlineHandle:
        return InlineHandle(partial(cls, *args))

    def kill(self, handle: InlineHandle) -> None:
        handle.end()


class InlineHandle:
    """Looks like a Ray handle: `handle.method.remote(..)` gives an awaitable."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._actor: Any = None
        self._running: dict[asyncio.Future[Any], asyncio.Task[None]] = {}
        self._ended = False

    def __getattr__(self, method: str) -> InlineMethod:
        return InlineMethod(self, method)

    def call(self, method: str, args: tuple[object, ...]) -> asyncio.Future[Any]:
        outcome: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if self._ended:
            outcome.set_exception(_Gone("the actor has ended"))
        else:
            self._running[outcome] = asyncio.ensure_future(self._serve(outcome, method, args))
        # nobody need look at the outcome of a call that only sends something
        outcome.add_done_callback(lambda done: done.cancelled() or done.exception())
        return outcome

    async def _serve(self, outcome: asyncio.Future[Any], method: str, args: tuple[object, ...]) -> None:
        try:
            if self._actor is None:
                self._actor = self._make()
            value = getattr(self._actor, method)(*args)
            if isinstance(value, Coroutine):
                value = await value
            if not outcome.done():
                outcome.set_result(value)
        # boundary: whatever an actor's code raises is the caller's to judge, as it is with an actor of its own process
        except Exception as error:  # noqa: BLE001
            if not outcome.done():
                outcome.set_exception(_Raised(error))
        finally:
            self._running.pop(outcome, None)

    def end(self) -> None:
        """Fail what runs. An actor with tasks or threads of its own has an `end` that stops them: no process dies here."""
        self._ended = True
        for outcome, task in list(self._running.items()):
            task.cancel()
            if not outcome.done():
                outcome.set_exception(_Gone("the actor was ended"))
        actor, self._actor = self._actor, None
        if hasattr(actor, "end"):
            actor.end()


class InlineMethod:
    """What `.remote` hangs on."""

    def __init__(self, handle: InlineHandle, method: str) -> None:
        self._handle = handle
        self._method = method

    def remote(self, *args: object) -> asyncio.Future[Any]:
        return self._handle.call(self._method, args)
