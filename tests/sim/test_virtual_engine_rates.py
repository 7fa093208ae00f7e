"""A simulated engine delivers what the validated inference model says of the same load: one model, two ways to ask it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial

import pytest

from rollart.core.resources import Degrees
from rollart.perf.serving import Workload, serve
from rollart.sim.batching import Batching
from rollart.sim.hardware import EngineHardware, Hardware
from rollart.sim.loop import run
from rollart.sim.pace import Work
from virtual_configs import a_virtual

ROUNDS, WARM = 8, 2
"""Answers that each client takes in turn; the first ones, sent all at once, are left out."""


def tokens_per_s(engine: EngineHardware, *, prompt: int, answer: int, clients: int) -> float:
    """Clients that send a prompt as soon as they have their answer, started over the time of one answer."""
    batching = Batching(engine.cost, engine.rules)
    ends: list[float] = []

    async def client(number: int) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(number * 0.05)
        for turn in range(ROUNDS):
            done: asyncio.Future[None] = loop.create_future()
            key = (number, turn)
            batching.start(key, Work(read=prompt, context=prompt, wanted=answer), partial(done.set_result, None))
            await done
            batching.stop(key)
            ends.append(loop.time())

    async def main() -> None:
        await asyncio.gather(*(client(number) for number in range(clients)))

    run(main())
    low, high = WARM * clients, (ROUNDS - WARM) * clients
    return (high - low) * answer / (ends[high] - ends[low])


@pytest.mark.parametrize(("pool", "degrees"), [
    ("train", Degrees()), ("roll", Degrees()), ("roll", Degrees(tp=4)), ("roll", Degrees(pp=2)), ("roll", Degrees(tp=2, pp=4)),
])  # fmt: skip
@pytest.mark.parametrize(("prompt", "answer", "clients"), [(512, 256, 64), (2000, 100, 32), (100, 1000, 128)])
def test_the_same_load_takes_the_same_time(pool: str, degrees: Degrees, prompt: int, answer: int, clients: int) -> None:
    config = a_virtual()
    engine = Hardware(config).engine(pool, config.cluster.pools[pool], degrees)
    says = serve(engine.cost.server, Workload(prompt=prompt, answer=answer, concurrency=clients)).tokens_per_s
    assert tokens_per_s(engine, prompt=prompt, answer=answer, clients=clients) == pytest.approx(says, rel=0.1)


def test_a_faster_memory_decodes_faster_and_more_flops_read_faster() -> None:
    """RollArt's reason for affinity: an H20 decodes as fast as an H800 and reads prompts several times as slowly."""
    config = a_virtual()
    hardware = Hardware(config)
    h800, h20 = (hardware.engine(pool, config.cluster.pools[pool], Degrees()) for pool in ("train", "roll"))
    assert h20.cost.step_s(16.0, 4096.0) < h800.cost.step_s(16.0, 4096.0)
    read = {"prefill": 8192.0, "prefill_context": 4096.0}
    assert h20.cost.step_s(0.0, 0.0, **read) > 3 * h800.cost.step_s(0.0, 0.0, **read)


def test_host_work_is_part_of_a_step() -> None:
    config = a_virtual()
    engine = Hardware(config).engine("roll", config.cluster.pools["roll"], Degrees())
    server = engine.cost.server
    idle_host = replace(server, facts=replace(server.facts, host=0.0))
    assert engine.cost.step_s(8.0, 1000.0) > idle_host.whole_step_s(8.0, 1000.0, 0.0, 0.0)
