"""How many nodes should read and how many decode: RollArt's table of ratios (arXiv 2512.22560), SWE-bench, four nodes.

H800 nodes read and H20 nodes decode, against the same nodes with prompts and answers mixed on each; batch 128, context 32k.
The paper: Qwen3-32B 741.2 -> 722.7 s at 1P3D and 734.9 -> 701.6 s at 2P2D, Qwen3-30B-A3B 327.4 -> 294.8 s and 305.2 ->
251.1 s; 3P1D is the worst ratio for both. Reproduced, with engines of 8 ranks: a gain in both cells of the dense model
(1.09 and 1.21 here, over three seeds 1.08 to 1.30) and the worst ratio. It does not hold everywhere: with engines of 4
ranks and answers four times as long the dense model lost 5 % at 2P2D. Not reproduced: a gain for the mixture of experts
(0.94 and 0.82). With its prefixes kept it has little to read and that is cheap, so what splitting saves is less than what
is lost with the memory bandwidth of the H800s, which then decode nothing.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import cache

from rollart.core.resources import Degrees
from rollart.core.types import RequestId, Sampling, Segment, TrajId, TurnRequest
from rollart.perf.calibrated import engine_cost
from rollart.perf.devices import device
from rollart.perf.engines import engine_facts
from rollart.perf.serving import Server
from rollart.perf.shapes import model_shape
from rollart.sim.batching import Batching, BatchRules
from rollart.sim.hardware import ServedCost
from rollart.sim.loop import run
from rollart.sim.pace import Pace, Work
from rollart.sim.prefixes import Prefixes
from rollart.sim.split import KvMove, split_pace
from rollart.sim.workload import Draws, workload

ENGINE, VERSION = "vLLM", "0.8.4"
RANKS, CONTEXT, GROUPS, GROUP_SIZE = 8, 32768, 16, 8
RATIOS = ((1, 3), (2, 2), (3, 1))
CALM = workload("swe_bench").model_copy(update={"storm": None, "pull": None})
"""Storms take longer than all the rest of a batch and would hide it."""


@dataclass(eq=False)
class Unit:
    """One engine, and what it keeps of attempts between their turns."""

    pace: Pace
    prefixes: Prefixes
    live: int = 0


def node(name: str, model: str) -> tuple[ServedCost, BatchRules]:
    cost = engine_cost(device(name), model_shape(model), Degrees(tp=RANKS), engine=ENGINE, version=VERSION)
    server = Server(cost=cost, facts=engine_facts(ENGINE, VERSION))
    rules = BatchRules(max_live=256, step_tokens=int(server.step_tokens), kv_tokens=cost.kv_capacity_tokens())
    return ServedCost(server), rules


def mixed_node(name: str, model: str) -> Unit:
    prefixes = Prefixes(shares=True)
    pace = Batching(*node(name, model), evict=prefixes.evict, idle=lambda: prefixes.idle_tokens)
    return Unit(pace, prefixes)


def mixed_nodes(model: str, h800: int, h20: int) -> list[Unit]:
    return [mixed_node(name, model) for name in ("H800",) * h800 + ("H20",) * h20]


def split_nodes(model: str, h800: int, h20: int) -> list[Unit]:
    shape, prefixes = model_shape(model), Prefixes(shares=True)
    (read_cost, read_rules), (decode_cost, decode_rules) = node("H800", model), node("H20", model)
    move = KvMove(
        bytes_per_token=shape.kv_bytes_per_token(2.0), bytes_per_s=RANKS * 50e9, latency_s=0.01, layers=shape.layers
    )
    pace = split_pace(
        read_cost=read_cost, read_rules=read_rules, readers=h800, decode_cost=decode_cost, decode_rules=decode_rules,
        decoders=h20, move=move, prefixes=prefixes,
    )  # fmt: skip
    return [Unit(pace, prefixes)]


async def episode(draws: Draws, units: list[Unit], traj: TrajId) -> None:
    """One trajectory on the unit with the fewest."""
    loop = asyncio.get_running_loop()
    await asyncio.sleep(draws.latency_s(traj, 0, "open", 0))
    unit = min(units, key=lambda unit: unit.live)
    unit.live += 1
    context = 0
    for turn in range(draws.turns(traj, 0)):
        context += draws.observed_tokens(traj, 0, turn)
        request = TurnRequest(
            id=RequestId(traj, 0, turn, 0), model="policy", purpose="train", domain="t", context=Segment(),
            max_tokens=CALM.response.cap, sampling=Sampling(),
        )  # fmt: skip
        wanted = min(draws.sampled_tokens(request), CONTEXT - context)
        if wanted < 1:
            break
        taken = unit.prefixes.take((traj, 0), context, prompt=draws.observed_tokens(traj, 0, 0))
        over = loop.create_future()
        work = Work(read=taken.new + taken.rebuilt, context=context, wanted=wanted)
        unit.pace.start(request.id, work, lambda over=over: over.set_result(None))  # type: ignore[misc]
        await over
        unit.pace.stop(request.id)
        context += wanted
        unit.prefixes.keep((traj, 0), context)
        await asyncio.sleep(draws.latency_s(traj, 0, "step", turn))
    unit.live -= 1
    unit.prefixes.forget((traj, 0))


@cache
def batch_s(model: str, h800: int, h20: int, *, split: bool) -> float:
    """Seconds until the last trajectory of a batch is over."""
    draws, make = Draws(CALM, 0), split_nodes if split else mixed_nodes

    async def main() -> float:
        units = make(model, h800, h20)
        trajs = [TrajId(f"train/t/0/{group}/{member}") for group in range(GROUPS) for member in range(GROUP_SIZE)]
        await asyncio.gather(*(episode(draws, units, traj) for traj in trajs))
        return asyncio.get_running_loop().time()

    return run(main())


def test_a_dense_model_gains_from_reading_and_decoding_apart() -> None:
    for ratio in ((1, 3), (2, 2)):
        assert batch_s("qwen3-32b", *ratio, split=True) < 0.98 * batch_s("qwen3-32b", *ratio, split=False)


def test_three_nodes_that_read_for_one_that_decodes_are_the_worst_ratio() -> None:
    for model in ("qwen3-32b", "qwen3-30b-a3b"):
        times = {ratio: batch_s(model, *ratio, split=True) for ratio in RATIOS}
        assert max(times, key=times.__getitem__) == (3, 1)
