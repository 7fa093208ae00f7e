"""The trainer port over actors: in this process, and as two ranks of Ray."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trainer_samples import MODEL, VOCAB, random_samples, rows_of, sample, sampled, train_step, trainer_rank, written

from rollart.config.schema import (
    MaxDigitEnv,
    Optimizer,
    PretrainedModel,
    RunConfig,
    Schedule,
    TaskConfig,
    TrainerConfig,
)
from rollart.core.errors import ClusterError, TrainerError, TrainerLost
from rollart.core.types import Failure
from rollart.learn.credit import total_weight
from rollart.runtime.actors import Actors, InlineActors, RayActors, fetch
from rollart.runtime.trainer.facade import RemoteTrainer, TrainerActor, _together, start_trainer
from rollart.runtime.trainer.rank import spec_of
from rollart.runtime.trainer.warm import Transcript
from rollart.runtime.weights import BucketLocation, fingerprint, unpack

BUCKET_BYTES = 2000
CONFIG = RunConfig(
    tasks={"digits": TaskConfig(env=MaxDigitEnv(kind="max_digit"))},
    model=MODEL,
    optimizer=Optimizer(lr=0.01),
    schedule=Schedule(batch=8, group_size=4),
    trainer=TrainerConfig(bucket_bytes=BUCKET_BYTES, micro_batch_tokens=64),
)
TWO = CONFIG.model_copy(update={"trainer": CONFIG.trainer.model_copy(update={"ranks": 2})})
SAMPLES = random_samples(8)


def alive(
    live: Callable[[RemoteTrainer], Awaitable[None]], actors: Actors | None = None, config: RunConfig = CONFIG
) -> None:
    """Start a trainer, live, and stop it."""

    async def life() -> None:
        trainer = await start_trainer(config, VOCAB, actors or InlineActors())
        try:
            await live(trainer)
        finally:
            await trainer.stop()
        with pytest.raises(TrainerLost, match="the trainer is gone"):
            await trainer.finish()

    asyncio.run(life())


async def one_step(trainer: RemoteTrainer) -> None:
    """A step in two calls equals one of a rank that is called directly, and so do the log-probabilities after it."""
    with trainer_rank(spec_of(CONFIG, VOCAB)) as rank:
        expected = train_step(rank, SAMPLES)
        old = rank.logprobs(rows_of(rank, [SAMPLES]))
    await trainer.begin(0, total_weight=total_weight(SAMPLES))
    parts = [await trainer.accumulate(SAMPLES[:5]), await trainer.accumulate(SAMPLES[5:])]
    assert sum(part["trajectories"] for part in parts) == 8
    metrics = await trainer.finish()
    for name in expected.keys() - {"micro_batches", "computed_tokens"}:
        assert metrics[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-6), name
    found = await trainer.logprobs(SAMPLES)
    assert found.keys() == old.keys()
    for key, logprobs in old.items():
        assert found[key] == pytest.approx(logprobs, abs=1e-4)


async def one_publish(trainer: RemoteTrainer, version: int) -> str:
    """What is fetched, one handle per bucket, is what was published; returns its digest."""
    manifest = await trainer.publish(version)
    location = manifest.location
    assert isinstance(location, BucketLocation)
    assert len(location.handles) == manifest.buckets == -(-manifest.n_bytes // BUCKET_BYTES)
    buckets = [await fetch(handle) for handle in location.handles]
    assert fingerprint(unpack(location.index, buckets)) == manifest.fingerprint.digest
    return manifest.fingerprint.digest


def test_a_step_through_the_port_equals_one_of_a_rank_and_weights_come_in_buckets() -> None:
    async def live(trainer: RemoteTrainer) -> None:
        await one_step(trainer)
        assert await one_publish(trainer, 0) == await one_publish(trainer, 1)

    alive(live)


def test_a_sample_that_cannot_be_trained_is_refused_by_name_and_the_trainer_lives_on() -> None:
    async def live(trainer: RemoteTrainer) -> None:
        bad = sample(written([1]), sampled([2], None), traj="train/t/0/7/2")
        with pytest.raises(TrainerError, match="training rank 0 raised: TrainerError: finish outside a step"):
            await trainer.finish()
        await trainer.begin(0, total_weight=None)
        with pytest.raises(TrainerError, match=r"trajectory train/t/0/7/2 .* lack their rollout log-probabilities"):
            await trainer.accumulate([*SAMPLES[:2], bad])
        await trainer.accumulate(SAMPLES[:2])
        assert (await trainer.finish())["trajectories"] == 2

    alive(live)


def test_a_checkpoint_that_cannot_be_written_does_not_end_the_trainer(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")

    async def live(trainer: RemoteTrainer) -> None:
        with pytest.raises(TrainerError, match="cannot write the trainer's checkpoint"):
            await trainer.checkpoint(str(tmp_path / "file" / "state"), "save")
        await one_publish(trainer, 0)

    alive(live)


def test_a_checkpoint_takes_the_trainer_back_and_a_resize_takes_it_along(tmp_path: Path) -> None:
    path = str(tmp_path / "trainer.safetensors")

    async def step(trainer: RemoteTrainer) -> Any:
        await trainer.begin(1, total_weight=None)
        await trainer.accumulate(SAMPLES[:4])
        return await trainer.finish()

    async def live(trainer: RemoteTrainer) -> None:
        before = await one_publish(trainer, 0)
        await trainer.checkpoint(path, "save")
        metrics = await step(trainer)
        assert await one_publish(trainer, 1) != before
        await trainer.checkpoint(path, "load")
        await trainer.resize(["another"])
        assert await one_publish(trainer, 2) == before
        assert await step(trainer) == metrics
        await trainer.begin(2, total_weight=None)
        with pytest.raises(TrainerError, match="with a step open cannot go to 1 ranks"):
            await trainer.resize(["another"])
        await step(trainer)
        with pytest.raises(TrainerError, match="needs at least one lease"):
            await trainer.resize([])

    alive(live)


class Hangs(TrainerActor):
    """A rank whose calls are never answered."""

    async def hang(self, *args: object) -> None:
        await asyncio.Event().wait()

    begin = accumulate = finish = logprobs = publish = checkpoint = warm_start = hang  # type: ignore[assignment]


CALLS: dict[str, Callable[[RemoteTrainer], Awaitable[object]]] = {
    "begin": lambda trainer: trainer.begin(0, total_weight=None),
    "accumulate": lambda trainer: trainer.accumulate(SAMPLES),
    "finish": lambda trainer: trainer.finish(),
    "logprobs": lambda trainer: trainer.logprobs(SAMPLES),
    "publish": lambda trainer: trainer.publish(0),
    "save": lambda trainer: trainer.checkpoint("trainer.safetensors", "save"),
    "load": lambda trainer: trainer.checkpoint("trainer.safetensors", "load"),
    "warm_start": lambda trainer: trainer.warm_start([], steps=1, batch=1, lr=1e-3, seed=0),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_rank_that_is_killed_in_a_call_loses_the_trainer_at_once_and_is_told_once(name: str) -> None:
    """The other rank waits for it, as in a collective: nobody waits for that one."""

    async def main() -> None:
        actors, told = InlineActors(), list[Failure]()
        spec = spec_of(TWO, VOCAB)
        handles = [actors.start(Hangs, spec, rank, actors.put) for rank in range(2)]
        trainer = RemoteTrainer(spec, actors, handles)
        trainer.watch(told.append)
        calling = asyncio.ensure_future(CALLS[name](trainer))
        await asyncio.sleep(0.01)
        actors.kill(handles[1])
        async with asyncio.timeout(2.0):
            with pytest.raises(TrainerLost, match="training rank 1 lost: "):
                await calling
            for later in CALLS.values():
                with pytest.raises(TrainerLost, match="the trainer is gone: training rank 1 lost"):
                    await later(trainer)
        assert [(one.where, one.kind, one.retryable) for one in told] == [("trainer", "lost", True)]
        await trainer.stop()

    asyncio.run(main())


def test_a_rank_that_fails_alone_loses_the_trainer_and_one_that_fails_with_all_others_does_not() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        failed, hangs, done = loop.create_future(), loop.create_future(), loop.create_future()
        failed.set_result(Failure(where="trainer", kind="raised", retryable=True, detail="RuntimeError: no peer"))
        done.set_result(3)
        with pytest.raises(TrainerLost, match="rank 0 raised: RuntimeError: no peer; 1 other ranks wait for it"):
            await _together([failed, hangs], grace_s=0.05)
        with pytest.raises(TrainerError, match="rank 0 raised: RuntimeError: no peer") as told:
            await _together([failed, failed])
        assert not isinstance(told.value, TrainerLost)
        assert await _together([done, done]) == [3, 3]

    asyncio.run(main())


def test_a_rank_that_dies_while_nothing_is_asked_of_it_is_told() -> None:
    """What it published is gone with it: engines may be waiting for that, and the trainer for what they sample."""

    async def main() -> None:
        lost: asyncio.Future[Failure] = asyncio.get_running_loop().create_future()
        actors = InlineActors()
        trainer = await start_trainer(CONFIG, VOCAB, actors)
        trainer.watch(lost.set_result)
        await trainer.publish(0)
        actors.kill(trainer._ranks[0])
        async with asyncio.timeout(10.0):
            assert (await lost).detail.startswith("training rank 0 lost: ")
        with pytest.raises(TrainerLost):
            await trainer.publish(1)
        await trainer.stop()

    asyncio.run(main())


def test_a_trainer_that_takes_a_lost_ones_place_repeats_its_steps_bit_for_bit(tmp_path: Path) -> None:
    path = str(tmp_path / "trainer.safetensors")
    actors = InlineActors()

    async def step(trainer: RemoteTrainer, number: int) -> Any:
        await trainer.begin(number, total_weight=8.0)
        for start in (0, 3):
            await trainer.accumulate(random_samples(8, seed=number)[start : start + 5 if start else 3])
        return await trainer.finish()

    async def live(trainer: RemoteTrainer) -> None:
        await step(trainer, 0)
        await one_publish(trainer, 1)
        await trainer.checkpoint(path, "save")
        metrics = [await step(trainer, number) for number in (1, 2)]
        once = await one_publish(trainer, 3)
        actors.kill(trainer._ranks[0])
        with pytest.raises(TrainerLost):
            await step(trainer, 3)
        other = await start_trainer(CONFIG, VOCAB, actors)
        await step(other, 7)
        await other.checkpoint(path, "load")
        assert [await step(other, number) for number in (1, 2)] == metrics
        with pytest.raises(TrainerError, match="version 1 is not above 1"):
            await other.publish(1)
        assert await one_publish(other, 4) == once
        await other.stop()

    alive(live, actors)


def test_transcripts_of_any_kind_warm_a_trainer() -> None:
    ids = np.arange(1, 9)

    async def live(trainer: RemoteTrainer) -> None:
        warm = await trainer.warm_start([Transcript(ids, ids % 2 == 0)], steps=2, batch=4, lr=1e-3, seed=0)
        assert warm["tokens"] == 2 * 4 * 4

    alive(live)


def test_a_trainer_that_cannot_start_says_why() -> None:
    config = CONFIG.model_copy(update={"model": PretrainedModel(kind="pretrained", path="/nowhere")})
    with pytest.raises(ClusterError, match=r"did not start: .*model.path=/nowhere: no config.json"):
        asyncio.run(start_trainer(config, VOCAB, InlineActors()))


@pytest.fixture
def ray() -> Iterator[Any]:
    import ray

    ray.init(
        address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=80 << 20,
        configure_logging=False,
    )  # fmt: skip
    yield ray
    ray.shutdown()


@pytest.mark.ray
def test_two_ranks_in_processes_train_as_one_until_one_of_them_is_killed(ray: Any) -> None:
    async def live(trainer: RemoteTrainer) -> None:
        await one_step(trainer)
        manifest = await trainer.publish(0)
        assert isinstance(manifest.location, BucketLocation)
        assert all(isinstance(handle, ray.ObjectRef) for handle in manifest.location.handles)
        await one_publish(trainer, 1)
        os.kill((await trainer.pids())[1], signal.SIGKILL)
        with pytest.raises(TrainerLost, match="training rank 1 lost: "):
            await trainer.begin(2, total_weight=None)
        with pytest.raises(TrainerLost, match="the trainer is gone: training rank 1 lost"):
            await trainer.accumulate([])

    alive(live, RayActors(), TWO)
