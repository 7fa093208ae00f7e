"""The trainer port over Ray actors."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
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
from rollart.core.errors import ClusterError, TrainerError
from rollart.learn.credit import total_weight
from rollart.runtime.trainer.facade import RemoteTrainer, start_trainer
from rollart.runtime.trainer.rank import spec_of
from rollart.runtime.trainer.warm import Transcript
from rollart.runtime.weights import BucketLocation, fingerprint, unpack

pytestmark = pytest.mark.ray

CONFIG = RunConfig(
    tasks={"digits": TaskConfig(env=MaxDigitEnv(kind="max_digit"))},
    model=MODEL,
    optimizer=Optimizer(lr=0.01),
    schedule=Schedule(batch=8, group_size=4),
    trainer=TrainerConfig(bucket_bytes=2000, micro_batch_tokens=64),
)


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    import ray

    ray.init(
        address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=80 << 20,
        configure_logging=False,
    )  # fmt: skip
    yield ray
    ray.shutdown()


def test_a_step_through_actors_equals_one_in_this_process_and_weights_come_in_buckets(ray: Any, tmp_path: Path) -> None:
    samples = random_samples(8)
    with trainer_rank(spec_of(CONFIG, VOCAB)) as rank:
        expected = train_step(rank, samples)
        old = rank.logprobs(rows_of(rank, [samples]))

    async def life() -> None:
        trainer = await start_trainer(CONFIG, VOCAB)
        try:
            await refusals(trainer)
            await trainer.begin(0, total_weight=total_weight(samples))
            parts = [await trainer.accumulate(samples[:5]), await trainer.accumulate(samples[5:])]
            assert sum(part["trajectories"] for part in parts) == 8
            metrics = await trainer.finish()
            for name in expected.keys() - {"micro_batches", "padded_tokens"}:
                assert metrics[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-7), name
            found = await trainer.logprobs(samples)
            for key, logprobs in old.items():
                assert found[key] == pytest.approx(logprobs, abs=1e-4)

            manifest = await trainer.publish(0)
            location = manifest.location
            assert isinstance(location, BucketLocation)
            assert all(isinstance(handle, ray.ObjectRef) for handle in location.handles)
            assert len(location.handles) == manifest.buckets == -(-manifest.n_bytes // 2000)
            buckets = [await handle for handle in location.handles]  # type: ignore[misc]
            assert fingerprint(unpack(location.index, buckets)) == manifest.fingerprint.digest

            await two_ranks(trainer, manifest.fingerprint.digest, tmp_path)
        finally:
            await trainer.stop()
        with pytest.raises(TrainerError, match="the trainer is gone"):
            await trainer.finish()

    asyncio.run(life())


async def refusals(trainer: RemoteTrainer) -> None:
    """A sample that cannot be trained and a call out of order are refused with the reason; the trainer lives on."""
    bad = sample(written([1]), sampled([2], None), traj="train/t/0/7/2")
    with pytest.raises(TrainerError, match="training rank 0 raised: TrainerError: finish outside a step"):
        await trainer.finish()
    await trainer.begin(0, total_weight=None)
    with pytest.raises(TrainerError, match=r"trajectory train/t/0/7/2 .* lack their rollout log-probabilities"):
        await trainer.accumulate([*random_samples(2), bad])
    await trainer.accumulate(random_samples(2))


async def two_ranks(trainer: RemoteTrainer, digest: str, folder: Path) -> None:
    """Go on with two ranks, and load what one rank saved; then one rank dies."""
    path = str(folder / "trainer.safetensors")
    await trainer.checkpoint(path, "save")
    await trainer.begin(1, total_weight=None)
    with pytest.raises(TrainerError, match="with a step open cannot go to 2 ranks"):
        await trainer.resize(["a", "b"])
    await trainer.accumulate(random_samples(4, seed=1))
    one = await trainer.finish()

    await trainer.checkpoint(path, "load")
    await trainer.resize(["a", "b"])
    assert (await trainer.publish(1)).fingerprint.digest == digest
    await trainer.begin(1, total_weight=None)
    await trainer.accumulate(random_samples(4, seed=1))
    two = await trainer.finish()
    for name in ("loss", "grad_norm", "entropy", "tis_mean", "trajectories"):
        assert two[name] == pytest.approx(one[name], rel=1e-4), name
    ids = np.arange(1, 9)
    warm = await trainer.warm_start([Transcript(ids, ids % 2 == 0)], steps=2, batch=4, lr=1e-3, seed=0)
    assert warm["tokens"] == 2 * 4 * 4

    os.kill((await trainer.pids())[1], signal.SIGKILL)
    with pytest.raises(TrainerError, match="training rank 1 lost: "):
        await trainer.begin(2, total_weight=None)
    with pytest.raises(TrainerError, match="the trainer is gone: training rank 1 lost"):
        await trainer.accumulate([])


def test_a_trainer_that_cannot_start_says_why_and_leaves_no_process(ray: Any) -> None:
    config = CONFIG.model_copy(update={"model": PretrainedModel(kind="pretrained", path="/nowhere")})
    with pytest.raises(ClusterError, match=r"did not start: .*model.path=/nowhere: no config.json"):
        asyncio.run(start_trainer(config, VOCAB))
