"""RollArt's thirteen oracles, one test each, and the closed form of what a barrier costs. Those of engines are here on rates;
`test_virtual_oracles.py` has them on the engines of a configuration.

alpha, the age of an engine's version that the paper bounds, is read through the table of design 5: `early` with max_staleness n
is alpha n, `paper` with n is alpha n - 1. Oracle 2 is design 4.7's bound of admission, which needs no cap per environment.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import numpy as np
import pytest

from benchmark_modules import loaded
from rollart.config.cluster import LinkConfig
from rollart.config.schema import RunConfig
from rollart.control.run import run
from rollart.core.errors import failure
from rollart.core.resources import EngineInfo
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
from rollart.perf.devices import device
from rollart.perf.prices import relative_cost
from rollart.recipes.presets import SYNC_PLUS
from rollart.recipes.registry import resolve
from rollart.sim.engine import EngineModel, SimEngine
from rollart.sim.loop import run as run_virtually
from rollart.sim.transfer import weight_path
from rollart.sim.virtual import Virtual, build
from rollart.sim.world import SimCluster, TrainerModel
from simruns import Row, SimRun, a_config, a_task, check, random_env, record_of, simulate, trained

RA6 = loaded("ra6")
ALPHA = [("early", 0, 0), ("early", 1, 1), ("early", 2, 2), ("paper", 1, 0), ("paper", 2, 1), ("paper", 3, 2)]
APPLY_S, TOKEN_S = 0.3, 0.1


def a_rollart_run(order: str = "paper", max_staleness: int = 2, *, engine: Mapping[str, Any] | None = None,
                  env: Mapping[str, Any] | None = None, **schedule: Any) -> SimRun:  # fmt: skip
    tasks = [a_task()]
    config = a_config(
        tasks, engines=2,
        schedule={"steps": 6, "sync_order": order, "max_staleness": max_staleness, **schedule},
    )  # fmt: skip
    cluster = SimCluster(
        engine=EngineModel(**{"token_s": TOKEN_S, "prefetch_s": 0.4, "apply_s": APPLY_S, **(engine or {})}),
        env=random_env(mean_s=2.0, **(env or {})),
        trainer=TrainerModel(finish_s=3.0),
    )
    return simulate(config, tasks, cluster)


@pytest.mark.parametrize(("order", "max_staleness", "alpha"), ALPHA)
def test_oracle_1_nothing_older_than_alpha_is_consumed_and_the_counts_balance(
    order: str, max_staleness: int, alpha: int
) -> None:
    sim = a_rollart_run(order, max_staleness)
    check(sim)
    lags = []
    for batch in sim.of("batch_released"):
        served = max(row["version"] for row in sim.of("applied") if row["seq"] < batch["seq"])
        members = [row for group in batch["groups"] for row in record_of(sim).members[group]]
        ages = [served - row["oldest_version"] for row in members]
        assert max(ages) <= alpha
        lags.append(batch["staleness_max"])
    assert max(lags) == max_staleness, "the bound is used"
    consumed = sum(len(members) for members in trained(sim).values())
    ended = Counter(row["status"] for row in sim.of("traj_finished"))
    evicted = ended["done"] - consumed
    assert evicted >= 0
    assert len(sim.of("traj_started")) == consumed + evicted + ended["aborted"] + ended["failed"]


def test_oracle_2_open_buffered_and_training_groups_stay_within_the_window() -> None:
    sim = a_rollart_run(redundancy=1)
    check(sim)
    inside, most, batches = 0, 0, {row["version"]: len(row["groups"]) for row in sim.of("batch_released")}
    for row in sim.rows:
        inside += row["kind"] == "group_opened"
        inside -= row["kind"] == "group_dropped"
        if row["kind"] == "published" and row["version"]:
            inside -= batches[row["version"] - 1]
        most = max(most, inside)
    assert most == (2 + 1) * 16 // 4
    with pytest.raises(ValueError, match="not a multiple"):
        a_config([a_task()], schedule={"batch": 18})


def test_oracle_3_a_part_of_a_turn_has_one_version_if_an_apply_aborts_and_versions_never_fall() -> None:
    sim = a_rollart_run("early", engine={"rebuilds": False})
    check(sim)
    turns = sim.of("turn_done")
    assert any(row["part"] for row in turns), "turns that an apply cut short and that went on"
    assert all(len(row["spans"]) <= 1 for row in turns)
    for traj in {row["traj"] for row in turns}:
        versions = [span[0] for row in turns if row["traj"] == traj for span in row["spans"]]
        assert versions == sorted(versions)


def test_oracle_4_no_engine_samples_while_weights_change_and_no_request_is_lost_or_doubled() -> None:
    sim = a_rollart_run()
    check(sim)
    address = ("traj", "attempt", "turn", "part")
    asked = Counter(tuple(row[name] for name in address) for row in sim.of("turn_routed"))
    answered = Counter(tuple(row[name] for name in address) for row in sim.of("turn_done"))
    assert asked == answered
    assert set(asked.values()) == {1}
    changing = [(row["engine"], row["t"] - APPLY_S, row["t"], row["version"]) for row in sim.of("applied")]
    stood = 0
    for turn in sim.of("turn_done", finish="length"):
        begin, end = turn["t"] - turn["seconds"], turn["t"]
        mine = [(before, after, version) for engine, before, after, version in changing if engine == turn["engine"]]
        still = sum(max(0.0, min(end, after) - max(begin, before)) for before, after, _ in mine)
        least = turn["sampled"] * TOKEN_S + still
        assert turn["seconds"] >= least - 1e-4
        if turn["spans"][0][0] <= max(
            version for before, _, version in mine if before <= begin
        ):  # else it waits for that
            applies = sum(begin < before < end for before, _, _ in mine)
            assert turn["seconds"] <= least + applies * TOKEN_S + 1e-4, "a token that was begun is sampled anew"
        stood += still > 0
    assert stood


def test_oracle_5_a_kept_trajectory_is_rebuilt_whole_and_once_before_it_decodes_under_new_weights() -> None:
    answers: list[Generation] = []

    async def script(engine: SimEngine) -> None:
        context = Segment(pieces=(Tokens(n_tokens=16),))
        for turn in range(4):
            if turn == 1:
                for version in (1, 2):  # two versions in one environment step: still one rebuild
                    await engine.prefetch(Manifest(version=version, fingerprint=Fingerprint(digest=str(version))))
                    await engine.apply(version, kept="rebuild", pinned_deadline_s=0.0)
            answer = await engine.generate(request("t", turn, context))
            answers.append(answer)
            context = context.extended(answer.tokens, Tokens(n_tokens=4))

    on_an_engine(script)
    assert [answer.rebuilt_tokens for answer in answers] == [0, 16 + 8, 0, 0]
    assert [answer.prefilled_tokens for answer in answers] == [16, 4, 4, 4]


def on_an_engine(script: Callable[[SimEngine], Awaitable[None]]) -> None:
    async def main() -> None:
        info = EngineInfo(id="e", lease="l", pool="p", role="mixed", kv_tokens=1 << 20, fingerprint="bitwise")
        await script(SimEngine(info, EngineModel(token_s=0.125, apply_s=1.0)))

    run_virtually(main())


def request(name: str, turn: int, context: Segment, max_tokens: int = 8) -> TurnRequest:
    return TurnRequest(
        id=RequestId(TrajId(name), 0, turn, 0), model="policy", purpose="train", domain="t", context=context,
        max_tokens=max_tokens, sampling=Sampling(),
    )  # fmt: skip


def test_oracle_6_without_spread_a_barrier_costs_nothing() -> None:
    alike = np.full((32, 6), 10.0)
    assert RA6.simulated(alike, "turn") == RA6.simulated(alike, "none") == pytest.approx(60.0)


def test_oracle_7_early_with_staleness_0_is_the_synchronous_schedule_event_for_event() -> None:
    plain = a_rollart_run("early", 0)
    rest = {key: value for key, value in SYNC_PLUS["schedule"].items() if key not in ("sync_order", "max_staleness")}
    named = a_rollart_run(SYNC_PLUS["schedule"]["sync_order"], SYNC_PLUS["schedule"]["max_staleness"], **rest)
    assert plain.events == named.events
    stage = "rollout"
    for row in plain.rows:
        if row["kind"] == "batch_released":
            stage = "training"
        elif row["kind"] == "applied":
            stage = "rollout"
        elif row["kind"] == "turn_routed":
            assert stage == "rollout", "update, rollout, train, in turn"


def a_small_job(*overrides: str) -> RunConfig:
    """`sim_small` in less than a second: FrozenLake and GEM-math on four engines of two pools."""
    pools = ["cluster.pools.h800.devices_per_node=2", "cluster.pools.h20.devices_per_node=2"]
    sizes = ["schedule.batch=8", "schedule.group_size=2", "schedule.steps=2", "tasks.frozen_lake.max_turns=8"]
    return resolve("sim_small", [*pools, *sizes, *overrides]).config


def run_of(virtual: Virtual, beside: Callable[[list[Row]], Awaitable[None]] | None = None) -> list[Row]:
    rows: list[Row] = []

    async def main() -> None:
        world = virtual.world((lambda event: rows.append({**event, **event["data"]}),))
        other = None if beside is None else asyncio.ensure_future(beside(rows))
        try:
            await run(virtual.config, world)
        finally:
            if other is not None:
                other.cancel()

    run_virtually(main())
    return rows


def test_oracle_8_on_a_homogeneous_cluster_affinity_changes_nothing() -> None:
    """Neither what is learned nor the recipe's table parts pools that are alike."""
    alike = "cluster.pools.h800.device=H20"
    off = run_of(build(a_small_job(alike, "no_affinity")))
    assert a_small_job(alike).affinity.kind == "table"
    assert run_of(build(a_small_job(alike))) == off
    assert run_of(build(a_small_job(alike, "affinity"))) == off


def test_oracle_9_redundancy_trains_exactly_as_many_and_reports_the_waste() -> None:
    base = a_rollart_run()
    assert a_rollart_run(redundancy=0, redundant_groups=0).events == base.events
    sim = a_rollart_run(redundancy=2, redundant_groups=1)
    check(sim)
    assert {(len(row["groups"]), row["trajectories"]) for row in sim.of("batch_released")} == {(4, 16)}
    assert sim.of("ledger")[-1]["dropped"]["redundant"] > 0
    assert base.of("ledger")[-1]["dropped"].get("redundant", 0) == 0


def test_oracle_10_the_weight_path_is_push_and_pull_and_hides_part_of_the_pull() -> None:
    for gib, push_s, pull_s, naive_s in (
        (15.26, 32.4, 6.2, 38.6),
        (27.51, 67.8, 16.3, 84.1),
        (61.02, 127.3, 29.7, 157.0),
    ):
        assert naive_s == pytest.approx(push_s + pull_s), "RollArt's own table"
        path = weight_path(gib * 2**30, LinkConfig())
        assert path.naive_s == pytest.approx(path.push_s + path.pull_s)
        assert path.naive_s == pytest.approx(naive_s, rel=0.2)
        assert 0 < path.exposed_s <= path.pull_s


def test_oracle_11_the_mixed_cluster_costs_0_838_of_the_homogeneous_one() -> None:
    h800, h20 = relative_cost(device("H800")), relative_cost(device("H20"))
    assert h800 is not None
    assert h20 is not None
    assert (96 * h800 + 32 * h20) / (128 * h800) == pytest.approx(0.838, abs=5e-4)


def test_oracle_12_without_the_preferred_class_a_step_takes_longer_and_is_done() -> None:
    virtual = build(a_small_job("schedule.steps=3", "failure.restarts=0"))
    cluster = virtual.cluster
    whole = run_of(build(a_small_job("schedule.steps=3")))
    cluster.start_fault = lambda role, nth: (
        failure("cluster", "no_room", "the class is gone") if role == "mixed" and nth >= 4 else None
    )

    async def lose_the_class(rows: list[Row]) -> None:
        await asyncio.sleep(60.0)
        assert any(row["kind"] == "turn_done" for row in rows), "in the middle of the run"
        for index, engine in enumerate(cluster.engines[:4]):
            if engine.info.pool == "h20":
                cluster.lose_engine(index)

    left = run_of(virtual, lose_the_class)
    assert [row["step"] for row in left if row["kind"] == "step_finished"] == [0, 1, 2]
    assert left[-1]["status"] == "done"
    assert any(row.get("fallback") for row in left if row["kind"] == "turn_routed")
    assert not any(row.get("fallback") for row in whole if row["kind"] == "turn_routed")
    assert left[-1]["t"] > whole[-1]["t"]


def test_oracle_13_an_abort_takes_a_step_at_most_and_a_burst_of_commands_costs_no_throughput() -> None:
    ended: dict[str, float] = {}

    async def answer(engine: SimEngine, name: str) -> None:
        result = await engine.generate(request(name, 0, Segment(), 80))
        ended[name] = asyncio.get_running_loop().time()
        assert result.finish == ("aborted" if name.startswith("x") else "length")

    async def script(engine: SimEngine) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(answer(engine, "kept"))
            await asyncio.sleep(1.05)
            for n in range(200):
                group.create_task(answer(engine, f"x{n}"))
            await asyncio.sleep(1.0)
            asked = asyncio.get_running_loop().time()
            await engine.abort([request(f"x{n}", 0, Segment()).id for n in range(200)])
            await asyncio.sleep(0.125)
            assert {name for name, at in ended.items() if at - asked <= 0.125} == {f"x{n}" for n in range(200)}

    on_an_engine(script)
    assert ended["kept"] == 80 * 0.125


# --- RA-6 ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("sigma", "expected"), RA6.EXPECTED.items())
def test_a_barrier_costs_what_latency_alone_says(sigma: float, expected: float) -> None:
    """The closed form, as a mean over 100 seeds, within 3 %."""
    mean = np.mean([RA6.ratio(RA6.latencies(sigma, seed)) for seed in range(100)])
    assert mean == pytest.approx(expected, rel=RA6.WITHIN)


@pytest.mark.parametrize("sigma", [1.0, 10.0])
def test_the_simulator_comes_to_the_closed_form(sigma: float) -> None:
    """Fewer environments than the experiment has, for the same code."""
    seconds = RA6.latencies(sigma, 0, envs=64)
    through = RA6.simulated(seconds, "turn") / RA6.simulated(seconds, "none")
    assert through == pytest.approx(RA6.ratio(seconds), rel=1e-5)
