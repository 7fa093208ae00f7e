"""RollArt's oracles 3, 4, 5, 9 and 13 on the engines that a configuration makes: batches, caches and paths of weights."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace

from rollart.core.resources import DEFAULT_DEGREES, Lease
from rollart.core.types import (
    Fingerprint,
    Generation,
    Manifest,
    RequestId,
    Sampling,
    Segment,
    Tokens,
    TrajId,
    TurnRequest,
)
from rollart.recipes.registry import resolve
from rollart.sim.batching import Batching
from rollart.sim.engine import EngineModel, SimEngine
from rollart.sim.loop import run
from rollart.sim.virtual import Virtual, build
from rollart.sim.world import Fitted
from simruns import SimRun, check, simulate

ADDRESS = ("traj", "attempt", "turn", "part")


def a_world(*overrides: str, changed: Callable[[EngineModel], EngineModel] = lambda model: model) -> Virtual:
    """`sim_small` in less than a second: FrozenLake and GEM-math on four engines of two pools."""
    pools = ["cluster.pools.h800.devices_per_node=2", "cluster.pools.h20.devices_per_node=2"]
    sizes = ["schedule.batch=8", "schedule.group_size=2", "schedule.steps=3", "tasks.frozen_lake.max_turns=8"]
    made = build(resolve("sim_small", [*pools, *sizes, *overrides]).config)
    fit = made.cluster.engine_of
    assert fit is not None

    def changed_fit(lease: Lease) -> Fitted:
        fitted = fit(lease)
        return replace(fitted, model=changed(fitted.model))

    made.cluster.engine_of = changed_fit
    made.cluster.trainer = replace(made.cluster.trainer, remembers=True)
    return made


def a_run(*overrides: str, changed: Callable[[EngineModel], EngineModel] = lambda model: model) -> SimRun:
    made = a_world(*overrides, changed=changed)
    sim = simulate(made.config, made.tasks, made.cluster)
    check(sim)
    return sim


def on_an_engine(script: Callable[[SimEngine], Awaitable[None]]) -> None:
    """Of the H20 pool, serving version 0; a turn samples as many tokens as it may."""
    made = a_world(changed=lambda model: replace(model, length=lambda request: request.max_tokens))

    async def main() -> None:
        lease = await made.cluster.acquire("mixed", "h20", DEFAULT_DEGREES, deadline_s=1.0)
        assert isinstance(lease, Lease)
        engine = await made.cluster.start(lease)
        assert isinstance(engine, SimEngine)
        assert isinstance(engine._pace, Batching)
        await serve(engine, 0)
        await script(engine)

    run(main())


async def fetch(engine: SimEngine, version: int) -> None:
    assert await engine.prefetch(Manifest(version=version, fingerprint=Fingerprint(digest=str(version)))) is None


async def serve(engine: SimEngine, version: int) -> None:
    await fetch(engine, version)
    await engine.apply(version, kept="rebuild", pinned_deadline_s=0.0)


def a_request(member: int, turn: int, context: Segment, max_tokens: int = 8) -> TurnRequest:
    return TurnRequest(
        id=RequestId(TrajId(f"train/gem_math/0/0/{member}"), 0, turn, 0), model="policy", purpose="train",
        domain="gem_math", context=context, max_tokens=max_tokens, sampling=Sampling(),
    )  # fmt: skip


def of(n_tokens: int) -> Segment:
    return Segment(pieces=(Tokens(n_tokens=n_tokens),))


def test_oracle_3_a_part_of_a_turn_has_one_version_if_an_apply_aborts_and_versions_never_fall() -> None:
    sim = a_run("early", changed=lambda model: replace(model, rebuilds=False))
    turns = sim.of("turn_done")
    assert any(row["part"] for row in turns), "turns that an apply cut short and that went on"
    assert all(len(row["spans"]) <= 1 for row in turns)
    for traj in {row["traj"] for row in turns}:
        versions = [span[0] for row in turns if row["traj"] == traj for span in row["spans"]]
        assert versions == sorted(versions)
    assert any(len(row["spans"]) > 1 for row in a_run("early").of("turn_done")), "else it goes on under the new version"


def test_oracle_4_no_request_is_lost_or_doubled() -> None:
    sim = a_run()
    asked = Counter(tuple(row[name] for name in ADDRESS) for row in sim.of("turn_routed"))
    answered = Counter(tuple(row[name] for name in ADDRESS) for row in sim.of("turn_done"))
    assert asked == answered
    assert set(asked.values()) == {1}


def test_oracle_4_no_token_is_sampled_while_weights_change() -> None:
    answers: list[Generation] = []

    async def script(engine: SimEngine) -> None:
        loop, seen = asyncio.get_running_loop(), list[int]()
        await fetch(engine, 1)
        live = [asyncio.ensure_future(engine.generate(a_request(n, 0, of(500), 400))) for n in range(12)]
        await asyncio.sleep(0.5)
        began = loop.time()
        change = asyncio.ensure_future(engine.apply(1, kept="rebuild", pinned_deadline_s=0.0))
        await asyncio.sleep(0)
        while not change.done():
            seen.append(sum(engine.book().sampled.values()))
            await asyncio.sleep(0.01)
        assert loop.time() - began > 0.5
        assert len(seen) > 50
        assert set(seen) == {seen[0]}
        assert 0 < seen[0] < 12 * 400
        await asyncio.sleep(0.5)
        assert sum(engine.book().sampled.values()) > seen[0]
        answers.extend(await asyncio.gather(*live))

    on_an_engine(script)
    assert [answer.tokens.n_tokens for answer in answers] == [400] * 12
    assert {tuple(span.version for span in answer.tokens.spans) for answer in answers} == {(0, 1)}


def test_oracle_5_a_kept_trajectory_is_rebuilt_whole_and_once_before_it_decodes_under_new_weights() -> None:
    """Siblings share no more of it than their prompt."""
    answers: list[Generation] = []

    async def script(engine: SimEngine) -> None:
        contexts = [of(16), of(16)]
        for turn in range(4):
            if turn == 2:
                for version in (1, 2):  # two versions in one environment step: still one rebuild
                    await serve(engine, version)
            for member, context in enumerate(contexts):
                answer = await engine.generate(a_request(member, turn, context))
                answers.append(answer)
                contexts[member] = context.extended(answer.tokens, Tokens(n_tokens=4))

    on_an_engine(script)
    first, sibling = answers[::2], answers[1::2]
    assert [answer.rebuilt_tokens for answer in first] == [0, 0, 16 + 8 + 4 + 8, 0]
    assert [answer.prefilled_tokens for answer in first] == [16, 4, 4, 4]
    assert [answer.rebuilt_tokens for answer in sibling] == [0, 0, 8 + 4 + 8, 0]
    assert [answer.prefilled_tokens for answer in sibling] == [0, 4, 4, 4]


def test_oracle_9_redundancy_trains_exactly_as_many_and_reports_the_waste() -> None:
    base = a_run()
    assert a_run("schedule.redundancy=0", "schedule.redundant_groups=0").events == base.events
    sim = a_run("schedule.redundancy=2", "schedule.redundant_groups=1")
    assert {(len(row["groups"]), row["trajectories"]) for row in sim.of("batch_released")} == {(4, 8)}
    assert sim.of("ledger")[-1]["dropped"]["redundant"] > 0
    assert base.of("ledger")[-1]["dropped"].get("redundant", 0) == 0


def test_oracle_13_an_abort_takes_a_step_at_most_and_a_burst_of_commands_costs_no_throughput() -> None:
    ended: dict[int, float] = {}
    wanted, extra = 800, range(1, 201)

    async def answer(engine: SimEngine, member: int, n_tokens: int) -> Generation:
        result = await engine.generate(a_request(member, 0, of(64), n_tokens))
        ended[member] = asyncio.get_running_loop().time()
        return result

    async def script(engine: SimEngine) -> None:
        pace, loop = engine._pace, asyncio.get_running_loop()
        assert isinstance(pace, Batching)
        kept = asyncio.ensure_future(answer(engine, 0, wanted))
        await asyncio.sleep(1.0)
        burst = [asyncio.ensure_future(answer(engine, member, 8000)) for member in extra]
        await asyncio.sleep(1.0)
        asked, crowded_s = loop.time(), pace.cost.step_s(201, 100.0)
        live = engine.book().live
        assert len(live) == 201
        before = live[a_request(0, 0, of(64)).id].n_tokens
        await asyncio.gather(*(engine.abort([a_request(member, 0, of(64)).id]) for member in extra))
        await asyncio.sleep(crowded_s)
        assert {member for member, at in ended.items() if at - asked <= crowded_s} == set(extra)
        assert {(await aborted).finish for aborted in burst} == {"aborted"}
        assert (await kept).finish == "length"
        alone_s = pace.cost.step_s(1, 500.0)
        assert alone_s < 0.8 * crowded_s
        assert ended[0] - asked <= (wanted - before) * alone_s * 1.05 + crowded_s

    on_an_engine(script)
    assert set(ended) == {0, *extra}
