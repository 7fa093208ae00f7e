"""The trainer scores the fixed prompts as the model's definition in transformers does, and a disturbed layer shows."""

from __future__ import annotations

import asyncio

import numpy as np
import torch

from rollart.config.real import model_of
from rollart.core.types import Manifest
from rollart.recipes.registry import resolve
from rollart.runtime.actors import InlineActors
from rollart.runtime.models import build_model, hf_config, named_weights
from rollart.runtime.probe import MISMATCH, model_scores, prompts
from rollart.runtime.trainer.facade import start_trainer
from rollart.runtime.trainer.rank import spec_of
from rollart.runtime.weights import BucketLocation, unpack

VOCAB = 40
CONFIG = resolve("smoke", ["engine.kind=vllm", "model.hidden=64", "world.kind=inline"]).config


def test_prompts_follow_from_the_vocabulary_alone() -> None:
    assert np.array_equal(prompts(VOCAB), prompts(VOCAB))
    assert prompts(VOCAB).max() < VOCAB


def test_a_trainer_publishes_its_scores_for_an_engine_that_is_checked_by_them() -> None:
    async def published() -> Manifest:
        torch.set_num_threads(1)
        trainer = await start_trainer(CONFIG, VOCAB, InlineActors())
        try:
            return await trainer.publish(0)
        finally:
            await trainer.stop()

    manifest = asyncio.run(published())
    assert isinstance(manifest.location, BucketLocation)
    buckets = [bucket for bucket in manifest.location.handles if isinstance(bucket, np.ndarray)]
    tensors = unpack(manifest.location.index, buckets)
    expected = model_scores(hf_config(model_of(CONFIG), VOCAB), tensors)
    assert np.abs(np.subtract(manifest.fingerprint.probe, expected)).max() < 1e-5


def test_a_trainer_of_the_native_engine_scores_nothing() -> None:
    native = resolve("smoke", ["world.kind=inline"]).config
    assert not spec_of(native, VOCAB).probe


def test_every_disturbed_weight_moves_the_scores_beyond_rounding() -> None:
    config = hf_config(model_of(CONFIG), VOCAB)
    good = named_weights(build_model(config, seed=1))
    before = model_scores(config, good)
    for name in good:
        bad = good | {name: good[name] * 1.1}
        gap = np.abs(np.subtract(model_scores(config, bad), before)).mean()
        assert gap > MISMATCH["fp32"], name
