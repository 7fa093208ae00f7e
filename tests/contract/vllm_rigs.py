"""vLLM behind the engine port: the adapter with vLLM itself, where it is installed, and with a server that stands in for it."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sys
import zlib
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import fake_vllm
import torch
from inline_rigs import TOKENIZER, ids
from inline_rigs import request as short_request
from rigs import EngineRig
from torch import Tensor
from transformers import PretrainedConfig

from rollart.config.schema import ScratchModel, VllmEngine
from rollart.core.resources import EngineInfo
from rollart.core.types import Failure, Manifest, Segment, TurnRequest, Version
from rollart.runtime.actors import InlineActors, call
from rollart.runtime.engine.remote import RemoteEngine
from rollart.runtime.models import build_model, hf_config, named_weights
from rollart.runtime.probe import MISMATCH, model_scores, prompts
from rollart.runtime.vllm.actor import MakeServer, VllmActor
from rollart.runtime.vllm.server import ServerSpec, VllmServer
from rollart.runtime.weights import fingerprint, manifest, pack

VOCAB = TOKENIZER.vocab_size
MODEL = ScratchModel(layers=2, hidden=64, heads=2, kv_heads=1, ffn=96, max_positions=1024)
PYTHON = Path(__file__).parents[2] / ".venv-vllm" / "bin" / "python"
GATED = (str(Path(__file__).with_name("gated_vllm.py")), "--scheduler-cls", "gated_vllm.Gated")
CONTEXT = 2 * fake_vllm.BLOCK
Scores = Callable[[Mapping[str, Tensor]], tuple[float, ...]]


def request(name: str, **wanted: Any) -> TurnRequest:
    """With a context of whole blocks, so that its cache can be found again."""
    return short_request(name, **{"context": Segment(pieces=(ids(CONTEXT),))} | wanted)


def weights(version: Version) -> dict[str, Tensor]:
    return named_weights(build_model(hf_config(MODEL, VOCAB), seed=version))


def published(version: Version, tensors: Mapping[str, Tensor], scores: Scores) -> Manifest:
    index, buckets = pack(tensors, 10_000)
    return manifest(version, index, buckets, fingerprint(tensors), scores(tensors))


def faked_scores(tensors: Mapping[str, Tensor]) -> tuple[float, ...]:
    served = zlib.crc32(tensors[fake_vllm.EMBEDDING].numpy().tobytes())
    asked = prompts(VOCAB).tolist()
    return tuple(fake_vllm.score(served, a, b) for row in asked for a, b in itertools.pairwise(row))


def true_scores(tensors: Mapping[str, Tensor]) -> tuple[float, ...]:
    return model_scores(hf_config(MODEL, VOCAB), tensors)


def kill_server(server: VllmServer) -> None:
    """Of the server itself, not of what watches over it."""
    children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
    os.kill(int(children[0]), signal.SIGKILL)


def fake(spec: ServerSpec, config: PretrainedConfig) -> VllmServer:
    return VllmServer(replace(spec, python=sys.executable, program=(fake_vllm.__file__,)), config)


class Shared(VllmServer):
    """One that several rigs use, one after the other: it takes half a minute to start."""

    async def start(self) -> None:
        if not self.pid or self.ended():
            await super().start()

    def stop(self) -> None:
        """It goes on."""

    def really_stop(self) -> None:
        super().stop()


class Sharing:
    """Makes the one server, with a gate in its scheduler, and another when it has been killed."""

    def __init__(self) -> None:
        self.server: Shared | None = None

    def __call__(self, spec: ServerSpec, config: PretrainedConfig) -> VllmServer:
        if self.server is None or self.server.ended():
            self.close()
            self.server = Shared(replace(spec, program=GATED), config)
        return self.server

    def close(self) -> None:
        if self.server is not None:
            self.server.really_stop()


@asynccontextmanager
async def engine(make: MakeServer, scores: Scores, python: str = sys.executable) -> AsyncIterator[EngineRig]:
    torch.set_num_threads(1)
    config = VllmEngine(kind="vllm", python=python, max_live=48, start_s=500.0)
    servers: list[VllmServer] = []

    def go_on() -> None:
        for server in servers:
            (server.folder / fake_vllm.HOLD).unlink(missing_ok=True)

    def made(spec: ServerSpec, model: PretrainedConfig) -> VllmServer:
        servers.append(make(spec, model))
        return servers[-1]

    actors = InlineActors()
    actor = actors.start(VllmActor, MODEL, VOCAB, config, made)
    info = EngineInfo(
        id="engine-0", lease="l", pool="p", role="mixed", kv_tokens=1 << 16, fingerprint="probe",
        mismatch=MISMATCH["fp32"], version=-1,
    )  # fmt: skip
    port = RemoteEngine(info, actor, lambda name, why: None)
    try:
        started = await call("engine", actor.start.remote())
        assert not isinstance(started, Failure), started
        port.open()

        async def publish(version: Version) -> Manifest:
            return published(version, weights(version), scores)

        async def lose() -> None:
            kill_server(servers[-1])
            async with asyncio.timeout(20):
                while (await port.generate(request("is it gone", turn=next(turns)))).finish != "failed":
                    pass

        def hold() -> None:
            (servers[-1].folder / fake_vllm.HOLD).touch()

        turns = iter(range(1000))
        assert await port.prefetch(await publish(0)) is None
        applied = await port.apply(0, kept="rebuild", pinned_deadline_s=0.0)
        assert not isinstance(applied, Failure), applied
        yield EngineRig(
            engine=port, request=request, publish=publish, lose=lose, long_tokens=240, tick_s=0.005, hold=hold, go_on=go_on
        )  # fmt: skip
    finally:
        go_on()
        port.close()
        actors.kill(actor)


faked = partial(engine, fake, faked_scores)
