"""Field cases about weights on their way from the real trainer to the real engine, in one process."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Generator
from typing import Any

import torch

from rollart.config.schema import (
    EngineConfig,
    InlineWorld,
    PythonEnv,
    RunConfig,
    Schedule,
    ScratchModel,
    TaskConfig,
    TrainerConfig,
)
from rollart.core.resources import DEFAULT_DEGREES
from rollart.core.types import Failure
from rollart.runtime.actors import InlineActors, InlineHandle
from rollart.runtime.cluster import LocalCluster
from rollart.runtime.engine.remote import RemoteEngine
from rollart.runtime.tokenizers import build_tokenizer
from rollart.runtime.trainer.facade import RemoteTrainer, start_trainer

CONFIG = RunConfig(
    world=InlineWorld(kind="inline"),
    model=ScratchModel(layers=4, hidden=16, heads=2, kv_heads=2, ffn=32, max_positions=64),
    tasks={"t": TaskConfig(env=PythonEnv(kind="python", entry="nowhere:Nothing"), size=8)},
    schedule=Schedule(batch=8, group_size=4),
    trainer=TrainerConfig(bucket_bytes=12_000),
    engine=EngineConfig(max_live=4, kv_tokens=256),
)
TOKENIZER = build_tokenizer(CONFIG.tokenizer)


class Handle:
    """What stands for an array that was put; counts how often it is fetched."""

    def __init__(self, value: Any, calls: Counter[str]) -> None:
        self._value, self._calls = value, calls

    def __await__(self) -> Generator[Any, None, Any]:
        self._calls["fetch"] += 1
        yield from asyncio.sleep(0).__await__()
        return self._value


class CountingHandle(InlineHandle):
    def __init__(self, make: Callable[[], Any], calls: Counter[str]) -> None:
        super().__init__(make)
        self._calls = calls

    def call(self, method: str, args: tuple[object, ...]) -> asyncio.Future[Any]:
        self._calls[method] += 1
        return super().call(method, args)


class CountingActors(InlineActors):
    """Actors in this process, with every call and every array on its way counted."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def start(self, cls: type, *args: object) -> InlineHandle:
        return CountingHandle(lambda: cls(*args), self.calls)

    def _put(self, value: Any) -> Handle:
        self.calls["put"] += 1
        return Handle(value, self.calls)

    @property
    def put(self) -> Callable[[Any], Any]:  # type: ignore[override]
        return self._put


def test_a_sync_makes_one_call_per_bucket_and_none_per_parameter() -> None:
    """Field case 46: a bucket is put once and fetched once by each engine; all else is one call per sync."""

    async def main() -> None:
        actors = CountingActors()
        cluster = LocalCluster(
            CONFIG, TOKENIZER.vocab_size, actors, lambda: start_trainer(CONFIG, TOKENIZER.vocab_size, actors)
        )
        leases = [
            await cluster.acquire(role, "default", DEFAULT_DEGREES, deadline_s=60.0) for role in ("train", "mixed")
        ]
        try:
            assert not any(isinstance(lease, Failure) for lease in leases)
            trainer, engine = [await cluster.start(lease) for lease in leases]  # type: ignore[arg-type]
            assert isinstance(trainer, RemoteTrainer)
            assert isinstance(engine, RemoteEngine)
            for version in range(2):
                before = actors.calls.copy()
                manifest = await trainer.publish(version)
                assert await engine.prefetch(manifest) is None
                applied = await engine.apply(version, kept="rebuild", pinned_deadline_s=0.0)
                assert not isinstance(applied, Failure)
                assert applied.fingerprint == manifest.fingerprint
                calls = actors.calls - before
                assert 3 <= manifest.buckets < len(manifest.shards) // 5, "a call per parameter would be noticed"
                assert calls["put"] == calls["fetch"] == manifest.buckets
                assert (calls["publish"], calls["prefetch"], calls["apply"]) == (1, 1, 1)
                assert set(calls) <= {"put", "fetch", "publish", "prefetch", "apply", "poll", "pid"}
        finally:
            for lease in leases:
                await cluster.release(lease.id)  # type: ignore[union-attr]

    torch.set_num_threads(1)
    asyncio.run(main())
