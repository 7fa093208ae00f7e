"""Engines in two halves: one request against its closed form, many against one `Batching`, and nothing lost in between."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.core.errors import ConfigError, InvariantBroken
from rollart.core.seeds import rng
from rollart.core.types import RequestId, TrajId
from rollart.sim.batching import Batching, BatchRules
from rollart.sim.engine import EngineModel
from rollart.sim.loop import run
from rollart.sim.pace import Pace, Stopped, Work
from rollart.sim.prefixes import Prefixes
from rollart.sim.split import KvMove, SplitPace, split_pace
from rollart.sim.world import SimCluster, TrainerModel
from simruns import Row, SimRun, a_config, a_task, check, random_env, simulate

BASE_S, ROW_S, PROMPT_S = 0.01, 0.001, 0.0001
FREE = KvMove(bytes_per_token=1.0, bytes_per_s=math.inf)


class Linear:
    """A step costs something, each row and each prompt token more."""

    def step_s(self, batch: float, context: float, *, prefill: float = 0.0, prefill_context: float = 0.0) -> float:
        return BASE_S + ROW_S * batch + PROMPT_S * prefill


def rules(**changed: object) -> BatchRules:
    return BatchRules(**{"max_live": 64, "step_tokens": 512, "kv_tokens": 1e9, **changed})  # type: ignore[arg-type]


def halves(
    *, readers: int = 1, decoders: int = 1, move: KvMove = FREE, prefixes: Prefixes | None = None, **changed: object
) -> SplitPace:
    return split_pace(
        read_cost=Linear(), read_rules=rules(mixed=False), readers=readers, decode_cost=Linear(),
        decode_rules=rules(**changed), decoders=decoders, move=move, prefixes=prefixes,
    )  # fmt: skip


def busy_s(workers: Sequence[Batching]) -> float:
    return sum(worker.busy_s for worker in workers)


@dataclass
class Served:
    """What became of requests 0..n-1 that were started at given times."""

    done_s: dict[int, float] = field(default_factory=dict)
    stopped: dict[int, Stopped] = field(default_factory=dict)


def serve(pace: Pace, arrivals: list[tuple[float, Work]]) -> Served:
    served, everyone = Served(), asyncio.Event()

    def finisher(index: int) -> Callable[[], None]:
        def done() -> None:
            assert index not in served.done_s
            served.done_s[index] = asyncio.get_running_loop().time()
            assert pace.tokens(index) == arrivals[index][1].wanted
            served.stopped[index] = pace.stop(index)
            assert pace.stop(index) == Stopped(0)
            if len(served.done_s) == len(arrivals):
                everyone.set()

        return done

    async def main() -> None:
        loop = asyncio.get_running_loop()
        for index, (at_s, work) in enumerate(arrivals):
            loop.call_at(at_s, pace.start, index, work, finisher(index))
        await everyone.wait()
        await asyncio.sleep(10)

    run(main())
    return served


def test_one_request_is_read_here_moved_and_decoded_there() -> None:
    move = KvMove(bytes_per_token=1000.0, bytes_per_s=1e7, latency_s=0.02, layers=4)
    pace = halves(move=move)
    served = serve(pace, [(0.0, Work(read=512, context=512, wanted=11))])
    reading = BASE_S + 512 * PROMPT_S
    # the link takes 0.0512 s for all of it and kept up with reading, so the last layer's quarter is left
    # (a chunk is known on a grid, to a few percent)
    moving = max(0.0512 / 4, 0.0512 - reading) + 0.02
    decoding = (BASE_S + PROMPT_S) + 9 * (BASE_S + ROW_S)
    assert served.done_s[0] == pytest.approx(reading + moving + decoding, rel=0.05)
    assert served.stopped[0] == Stopped(11)
    assert pace.moved_bytes == 512_000
    assert pace.exposed_s == pytest.approx(moving, rel=0.15)
    assert busy_s(pace.readers) == pytest.approx(reading, rel=0.06)
    assert busy_s(pace.decoders) == pytest.approx(decoding, rel=0.03)


def test_a_slow_link_carries_one_request_after_the_other() -> None:
    slow = KvMove(bytes_per_token=1000.0, bytes_per_s=1e5, layers=32)
    served = serve(halves(move=slow), [(0.0, Work(read=100, context=100, wanted=2)) for _ in range(4)])
    assert sorted(served.done_s.values()) == pytest.approx([1.0, 2.0, 3.0, 4.0], abs=0.03)
    two = serve(halves(readers=2, move=slow), [(0.0, Work(read=100, context=100, wanted=2)) for _ in range(4)])
    assert sorted(two.done_s.values()) == pytest.approx([1.0, 1.0, 2.0, 2.0], abs=0.03)


def test_a_turn_of_one_token_is_over_when_it_is_read() -> None:
    pace = halves(move=KvMove(bytes_per_token=1.0, bytes_per_s=1.0))
    served = serve(pace, [(0.0, Work(read=100, context=100, wanted=1))])
    assert served.done_s[0] == pytest.approx(BASE_S + 100 * PROMPT_S, rel=0.05)
    assert busy_s(pace.decoders) == 0.0


def test_reading_no_longer_stops_decoding() -> None:
    arrivals = [(0.0, Work(read=1, context=1, wanted=50)), (0.2, Work(read=8192, context=8192, wanted=1))]
    one = serve(Batching(Linear(), rules(mixed=False)), arrivals)
    two = serve(halves(), arrivals)
    assert two.done_s[0] < one.done_s[0] - 0.5
    assert two.done_s[0] == pytest.approx(50 * (BASE_S + ROW_S), rel=0.05)


def test_new_requests_go_to_the_workers_with_the_least_to_do() -> None:
    pace = halves(readers=2, decoders=3)
    works = [(0.0, Work(read=400, context=400, wanted=20)) for _ in range(6)]
    serve(pace, works)
    assert [round(worker.busy_s, 2) for worker in pace.readers] == [
        pytest.approx(busy_s(pace.readers) / 2, rel=0.25)
    ] * 2
    assert [worker.busy_s for worker in pace.decoders] == [pytest.approx(busy_s(pace.decoders) / 3, rel=0.25)] * 3


def test_an_attempt_stays_with_its_workers_and_only_what_they_lack_is_read_and_moved() -> None:
    pace = halves(readers=2, decoders=2, move=KvMove(bytes_per_token=1.0, bytes_per_s=math.inf))
    ended: list[Stopped] = []

    async def turn(number: int, work: Work) -> None:
        over = asyncio.Event()
        key = RequestId(TrajId("train/t/0/0/0"), 0, number, 0)
        pace.start(key, work, over.set)
        await over.wait()
        ended.append(pace.stop(key))

    async def main() -> None:
        await turn(0, Work(read=500, context=500, wanted=40))
        busy = [worker.busy_s for worker in pace.decoders]
        mine = busy.index(max(busy))
        moved = pace.moved_bytes
        for number in (1, 2, 3):
            before = [worker.busy_s for worker in pace.decoders]
            read_before = busy_s(pace.readers)
            await turn(number, Work(read=100, context=700 + number, wanted=40))
            after = [worker.busy_s for worker in pace.decoders]
            assert [index for index in (0, 1) if after[index] > before[index]] == [mine]
            # what its partner sampled in the turn before is read as well, and not moved again
            assert busy_s(pace.readers) - read_before == pytest.approx(BASE_S + 140 * PROMPT_S, rel=0.06)
        assert pace.moved_bytes == moved + 3 * 100

    run(main())
    assert ended == [Stopped(40)] * 4


def test_idle_prefixes_take_room_of_the_decode_workers_and_go_before_anyone_is_preempted() -> None:
    prefixes = Prefixes()
    for index in range(8):
        prefixes.keep((TrajId(f"train/t/0/{index}/0"), 0), 50)
    pace = halves(decoders=2, prefixes=prefixes, kv_tokens=250.0)
    serve(pace, [(0.0, Work(read=40, context=40, wanted=60)) for _ in range(4)])
    assert pace.preemptions == 0
    assert prefixes.idle_tokens < 8 * 50


def test_a_full_decode_worker_preempts_and_reads_again_by_itself() -> None:
    pace = halves(kv_tokens=150.0)
    served = serve(pace, [(0.0, Work(read=40, context=40, wanted=60)) for _ in range(2)])
    assert pace.preemptions == 1
    assert [served.stopped[index].tokens for index in (0, 1)] == [60, 60]
    assert 40 < served.stopped[1].reread < 100


def test_what_can_never_have_room_is_refused_at_once() -> None:
    async def main() -> None:
        with pytest.raises(InvariantBroken, match="decode worker's cache of 50"):
            halves(kv_tokens=50.0).start(0, Work(read=40, context=40, wanted=11), lambda: None)

    run(main())


@pytest.mark.parametrize("wrong", [{"bytes_per_s": 0.0}, {"bytes_per_token": math.nan}, {"layers": 0}])
def test_a_link_that_carries_nothing_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="moving"):
        KvMove(**{"bytes_per_token": 1.0, "bytes_per_s": 1.0, **wrong})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="0 prefill"):
        halves(readers=0)


def test_progress_is_seen_in_every_phase_and_a_stop_takes_it() -> None:
    move = KvMove(bytes_per_token=1.0, bytes_per_s=math.inf, latency_s=1.0)
    seen: list[int] = []

    async def main() -> None:
        pace = halves(move=move)
        pace.start(0, Work(read=5120, context=5120, wanted=1000), lambda: None)
        for _ in range(12):
            await asyncio.sleep(0.25)
            seen.append(pace.tokens(0))
        assert pace.stop(0).tokens == seen[-1]
        assert pace.stop(0) == Stopped(0)
        assert pace.tokens(0) == 0
        for at_s in (0.1, 1.0):  # while it is read, while it is moved
            pace.start(1, Work(read=5120, context=5120, wanted=1000), lambda: None)
            await asyncio.sleep(at_s)
            stopped = pace.stop(1)
            assert stopped.tokens == int(at_s > 0.5)
            assert stopped.unread == (0 if at_s > 0.5 else pytest.approx(5120 * 0.83, rel=0.02))
        await asyncio.sleep(100)
        assert all(worker._held == pytest.approx(0) for worker in (*pace.readers, *pace.decoders))

    run(main())
    assert seen[:2] == [0, 0]
    assert seen[3:6] == [1, 1, 1]
    assert all(later > earlier for earlier, later in pairwise(seen[6:]))


WORKS = st.lists(
    st.tuples(
        st.floats(0, 3).map(lambda seconds: round(seconds, 2)),
        st.tuples(st.integers(1, 1500), st.integers(0, 200)).map(
            lambda two: Work(read=two[0], context=two[0], wanted=two[1])
        ),
    ),
    min_size=1,
    max_size=24,
)


@settings(max_examples=25, deadline=None)
@given(WORKS, st.integers(1, 3), st.integers(1, 3), st.sampled_from([math.inf, 1e4]), st.integers(1800, 5000))
def test_whatever_comes_everyone_is_served_once_within_the_caches(
    arrivals: list[tuple[float, Work]], readers: int, decoders: int, bytes_per_s: float, kv_tokens: int
) -> None:
    move = KvMove(bytes_per_token=1.0, bytes_per_s=bytes_per_s, latency_s=0.001, layers=8)
    pace = halves(readers=readers, decoders=decoders, move=move, kv_tokens=float(kv_tokens), max_live=16)
    served = serve(pace, arrivals)
    assert [served.stopped[index].tokens for index in range(len(arrivals))] == [work.wanted for _, work in arrivals]
    assert all(worker._held == pytest.approx(0, abs=1e-3) for worker in (*pace.readers, *pace.decoders))
    assert not pace._in
    assert pace._live == [0] * decoders
    assert pace._to_read == [0] * readers
    assert pace.moved_bytes == sum(work.read for _, work in arrivals if work.wanted > 1)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 60), st.integers(2, 200)), min_size=1, max_size=8))
def test_prompts_of_one_instant_are_served_as_by_one_engine_that_does_not_mix(sizes: list[tuple[int, int]]) -> None:
    """Nothing overlaps then: all is read in one step, and all decodes together, wherever that is."""
    arrivals = [(0.0, Work(read=read, context=read, wanted=wanted)) for read, wanted in sizes]
    one = serve(Batching(Linear(), rules(mixed=False)), arrivals).done_s
    two = serve(halves(), arrivals).done_s
    for index in one:
        assert two[index] == pytest.approx(one[index], abs=len(sizes) * (ROW_S - PROMPT_S) + 1e-3)


@settings(max_examples=25, deadline=None)
@given(WORKS)
def test_two_devices_without_a_link_between_them_are_no_slower_than_one(arrivals: list[tuple[float, Work]]) -> None:
    arrivals = [(at_s, Work(read=work.read, context=work.read, wanted=max(1, work.wanted))) for at_s, work in arrivals]
    one = serve(Batching(Linear(), rules(mixed=False)), arrivals).done_s
    two = serve(halves(), arrivals).done_s
    assert max(two.values()) <= max(one.values()) * 1.03 + 0.1


def a_run(seed: int, bytes_per_s: float) -> SimRun:
    """Versions applied and requests stopped in every phase, an engine lost on the way."""
    move = KvMove(bytes_per_token=1.0, bytes_per_s=bytes_per_s, latency_s=0.01, layers=4)
    tasks = [a_task(max_turns=3, max_tokens=40)]
    config = a_config(tasks, seed=seed, engines=2, schedule={"steps": 5, "max_staleness": 2, "redundancy": 1})
    cluster = SimCluster(
        engine=EngineModel(
            pace=lambda info, prefixes: halves(readers=2, decoders=2, move=move, prefixes=prefixes, kv_tokens=600.0),
            length=lambda request: rng(seed, "length", *request.id).randint(1, 40), shares=True, apply_s=0.2, prefetch_s=0.3,
        ),
        env=random_env(seed, mean_s=0.3),
        trainer=TrainerModel(finish_s=0.5),
    )  # fmt: skip

    async def lose_one(cluster: SimCluster, rows: list[Row]) -> None:
        await asyncio.sleep(3.0)
        cluster.lose_engine(0)

    return simulate(config, tasks, cluster, script=lose_one)


@pytest.mark.parametrize(("seed", "bytes_per_s"), [(0, math.inf), (1, 200.0)])
def test_whole_runs_on_split_engines_keep_every_promise_and_repeat_exactly(seed: int, bytes_per_s: float) -> None:
    first = a_run(seed, bytes_per_s)
    check(first)
    assert a_run(seed, bytes_per_s).events == first.events
