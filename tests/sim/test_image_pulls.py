"""What environments share: a link that images come over, room on hosts. Against closed forms."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.core.errors import ConfigError, failure
from rollart.core.seeds import unit
from rollart.core.types import Failure, TaskInstance, TrajId
from rollart.sim.envs import EnvModel, SimEnv, SimSession
from rollart.sim.laws import Constant
from rollart.sim.loop import run
from rollart.sim.shares import FairShare
from rollart.sim.storms import ImagePulls, Link, Pull
from rollart.sim.workload import Draws, workload
from rollart.sim.world import SimCluster
from simruns import Row, SimRun, a_config, a_task, check, random_env, simulate

GB = 1e9


def ends(share: Callable[[], FairShare], jobs: list[tuple[float, float]]) -> list[float]:
    """When jobs that come at some instant with some amount are done."""
    done, left = [math.nan] * len(jobs), list(jobs)

    async def main() -> None:
        loop, shared, all_done = asyncio.get_running_loop(), share(), asyncio.Event()

        def end(index: int) -> None:
            done[index] = loop.time()
            left.pop()
            if not left:
                all_done.set()

        for index, (at_s, amount) in enumerate(jobs):
            loop.call_at(at_s, shared.start, amount, partial(end, index))
        await all_done.wait()

    run(main())
    return done


# --- sharing -------------------------------------------------------------------------------------------------------------


def test_jobs_of_one_instant_share_equally_and_end_by_their_amounts() -> None:
    done = ends(lambda: FairShare(2.0), [(0, 2.0), (0, 2.0), (0, 6.0)])
    assert done == pytest.approx([3.0, 3.0, 5.0])


def test_a_late_job_halves_the_rate_of_the_first() -> None:
    done = ends(lambda: FairShare(1.0), [(0, 2.0), (1, 2.0)])
    assert done == pytest.approx([3.0, 4.0])


def test_alone_a_job_gets_no_more_than_one_may() -> None:
    done = ends(lambda: FairShare(4.0, each=1.0), [(0, 3.0), (0, 3.0), (10, 1.0), *[(20.0, 1.0)] * 8])
    assert done == pytest.approx([3.0, 3.0, 11.0, *[22.0] * 8])


def test_what_is_stopped_makes_room_for_the_others_and_says_what_it_lacked() -> None:
    async def main() -> None:
        loop, shared, done = asyncio.get_running_loop(), FairShare(1.0), asyncio.Event()
        first = shared.start(4.0, lambda: None)
        shared.start(4.0, done.set)
        await asyncio.sleep(2.0)
        assert shared.stop(first) == pytest.approx(3.0)
        assert shared.stop(first) == 0.0
        await done.wait()
        assert loop.time() == pytest.approx(5.0)
        assert shared.jobs == 0

    run(main())


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 40).map(lambda n: n / 4), st.floats(0, 5)), min_size=1, max_size=15),
    st.floats(0.2, 8), st.floats(0.2, 8),
)  # fmt: skip
def test_everyone_gets_what_it_came_for_at_the_common_rate(
    jobs: list[tuple[float, float]], capacity: float, each: float
) -> None:
    done = ends(lambda: FairShare(capacity, each), jobs)
    instants = sorted({*done, *(at_s for at_s, _ in jobs)})
    got = [0.0] * len(jobs)
    for start, end in itertools.pairwise(instants):
        there = [index for index, (at_s, _) in enumerate(jobs) if at_s <= start and done[index] >= end]
        for index in there:
            got[index] += (end - start) * min(each, capacity / len(there))
    assert got == pytest.approx([amount for _, amount in jobs], rel=1e-6, abs=1e-6)


def test_the_mean_time_of_random_arrivals_is_that_of_processor_sharing() -> None:
    """M/G/1 with processor sharing: mean time = service / (1 - load), whatever the law of service."""
    at_s, jobs = 0.0, []
    for index in range(6000):
        at_s -= math.log(unit("arrival", index)) / 0.5
        jobs.append((at_s, 1.0))
    done = ends(lambda: FairShare(1.0), jobs)
    mean = math.fsum(end - start for end, (start, _) in zip(done, jobs, strict=True)) / len(jobs)
    assert mean == pytest.approx(2.0, rel=0.08)


@pytest.mark.parametrize(("capacity", "each"), [(0.0, 1.0), (math.nan, 1.0), (1.0, -1.0), (math.inf, math.inf)])
def test_a_share_of_nothing_or_without_an_end_is_refused(capacity: float, each: float) -> None:
    with pytest.raises(ConfigError, match="something shared"):
        FairShare(capacity, each)


# --- images --------------------------------------------------------------------------------------------------------------


def traj(index: int) -> TrajId:
    return TrajId(f"train/t/0/{index}/0")


async def opened(env: SimEnv, index: int, deadline_s: float = 1e6) -> tuple[float, SimSession | Failure]:
    instance = TaskInstance(task="t", epoch=0, index=index, seed=index)
    session = await env.open(instance, traj=traj(index), attempt=0, deadline_s=deadline_s)
    return asyncio.get_running_loop().time(), session


def opening(model: EnvModel, number: int, *, deadline_s: float = 1e6) -> list[tuple[float, SimSession | Failure]]:
    async def main() -> list[tuple[float, SimSession | Failure]]:
        env = SimEnv(model, hosts=2)
        return list(await asyncio.gather(*(opened(env, index, deadline_s) for index in range(number))))

    return run(main())


LINK = Link(bytes_per_s=2 * GB, each_bytes_per_s=0.5 * GB)
PULLING = EnvModel(
    latency_s=lambda traj, attempt, call, turn: 3.0 if call == "open" else 0.0,
    pull=lambda traj, attempt: Pull(link=LINK, n_bytes=GB),
)


@pytest.mark.parametrize(("number", "seconds"), [(1, 2.0), (4, 2.0), (8, 4.0), (100, 50.0)])
def test_the_more_images_are_pulled_at_once_the_longer_all_of_them_take(number: int, seconds: float) -> None:
    assert [at_s for at_s, _ in opening(PULLING, number)] == pytest.approx([seconds + 3.0] * number)


def test_cached_images_are_not_slowed_by_those_that_are_pulled() -> None:
    model = replace(
        PULLING, pull=lambda traj, attempt: None if traj.split("/")[3] == "0" else Pull(link=LINK, n_bytes=GB)
    )
    times = [at_s for at_s, _ in opening(model, 41)]
    assert times[0] == 3.0
    assert times[1:] == pytest.approx([23.0] * 40)


def test_a_pull_that_passes_its_deadline_fails_and_frees_the_link() -> None:
    async def main() -> None:
        env = SimEnv(PULLING)
        impatient, patient = asyncio.create_task(opened(env, 0, 1.0)), asyncio.create_task(opened(env, 1))
        others = [asyncio.create_task(opened(env, index, 1.0)) for index in range(2, 40)]
        at_s, late = await impatient
        assert (at_s, isinstance(late, Failure) and late.kind) == (1.0, "timeout")
        for other in others:
            await other
        # a fortieth of 2 GB in the first second, the rest at what one may have
        assert (await patient)[0] == pytest.approx(1.0 + (1.0 - 0.05) / 0.5 + 3.0)
        assert env.open_sessions == 1

    run(main())


def test_a_lost_host_ends_the_pulls_of_its_sessions_at_once() -> None:
    async def main() -> None:
        env = SimEnv(PULLING, hosts=1)
        pulling = asyncio.create_task(opened(env, 0))
        await asyncio.sleep(0.5)
        env.lose("host-0", failure("env", "lost", "power"))
        at_s, why = await pulling
        assert (at_s, isinstance(why, Failure) and why.kind) == (0.5, "lost")
        assert env.links.share(LINK).jobs == 0

    run(main())


def test_which_images_are_cached_and_how_large_they_are_depends_on_no_schedule() -> None:
    load = workload("swe_bench")
    assert load.pull is not None
    one, two = Draws(load, 3), Draws(load, 3)
    pulls = [one.pull(traj(index), 0) for index in range(2000)]
    assert [two.pull(traj(index), 0) for index in reversed(range(2000))] == pulls[::-1]
    missing = [pull for pull in pulls if pull is not None]
    assert len(missing) == pytest.approx(2000 * (1 - load.pull.cached), rel=0.15)
    sizes = sorted(pull.n_bytes for pull in missing)
    assert sizes[len(sizes) // 2] == pytest.approx(GB, rel=0.25)
    assert sizes[-1] > 3 * GB
    assert Draws(workload("webshop"), 3).env().pull is None


def test_a_batch_without_a_cache_is_set_up_in_what_all_its_images_take_together() -> None:
    """The storm that RollArt names: hundreds of environments pull their images at once, and a cache ends it."""
    images = ImagePulls(gbyte=Constant(value=1.0), link_gbyte_per_s=2.0, cached=0.0)
    cold = Draws(workload("swe_bench").model_copy(update={"pull": images, "storm": None}), 0)
    warm = Draws(workload("swe_bench").model_copy(update={"pull": None, "storm": None}), 0)
    slow, fast = ([at_s for at_s, _ in opening(draws.env(), 256)] for draws in (cold, warm))
    assert [one - other for one, other in zip(slow, fast, strict=True)] == pytest.approx([128.0] * 256)


# --- hosts ---------------------------------------------------------------------------------------------------------------


def test_a_full_host_lets_sessions_wait_in_line_until_one_is_closed() -> None:
    async def main() -> None:
        env = SimEnv(EnvModel(sessions_per_host=2), hosts=2)
        first = [(await opened(env, index))[1] for index in range(4)]
        assert sorted(session.host for session in first if not isinstance(session, Failure)) == [
            "host-0", "host-0", "host-1", "host-1",
        ]  # fmt: skip
        waiting = [asyncio.create_task(opened(env, 4 + index)) for index in range(3)]
        late = asyncio.create_task(opened(env, 9, 2.0))
        await asyncio.sleep(1.0)
        assert not isinstance(first[3], Failure)
        await first[3].close()
        at_s, session = await waiting[0]
        assert (at_s, isinstance(session, SimSession) and session.host) == (1.0, first[3].host)
        at_s, why = await late
        assert (at_s, isinstance(why, Failure) and why.kind) == (2.0, "timeout")
        waiting[1].cancel()
        env.add("host-2")
        at_s, session = await waiting[2]
        assert isinstance(session, SimSession)
        assert (at_s, session.host) == (2.0, "host-2")
        assert env.open_sessions == 5

    run(main())


def test_a_place_that_was_given_to_one_who_has_just_gone_serves_the_next() -> None:
    async def main() -> None:
        env = SimEnv(EnvModel(sessions_per_host=1))
        _, session = await opened(env, 0)
        assert not isinstance(session, Failure)
        gone, next_ = asyncio.create_task(opened(env, 1)), asyncio.create_task(opened(env, 2))
        await asyncio.sleep(1.0)
        closing = asyncio.create_task(session.close())
        await asyncio.sleep(0)
        gone.cancel()
        at_s, given = await next_
        await closing
        assert (at_s, isinstance(given, SimSession)) == (1.0, True)

    run(main())


def a_run(seed: int) -> SimRun:
    tasks = [a_task(max_turns=3)]
    env = random_env(
        seed, mean_s=0.5, sessions_per_host=6, pull=lambda traj, attempt: (
            Pull(link=LINK, n_bytes=GB) if unit(seed, traj, attempt) < 0.5 else None
        ),
    )  # fmt: skip

    async def lose_one(cluster: SimCluster, rows: list[Row]) -> None:
        await asyncio.sleep(6.0)
        cluster.lose_host(0)

    config = a_config(
        tasks, seed=seed, schedule={"max_staleness": 1}, envs={"hosts": 2},
        failure={"on_failure": {"kind": "retry", "max_retries": 2}, "give_up_after": 1000},
    )  # fmt: skip
    return simulate(config, tasks, SimCluster(env=env), script=lose_one)


def test_whole_runs_on_crowded_hosts_keep_every_promise_and_repeat_exactly() -> None:
    first = a_run(1)
    check(first)
    assert a_run(1).events == first.events
    assert first.cluster.envs[0].open_sessions == 0
