"""Cores that are shared: no work is lost or won, first ones go first, and speeds follow who is busy."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.core.errors import ConfigError
from rollart.sim import loop
from rollart.sim.host import FIRST, Host, Process

Plan = list[tuple[float, list[float]]]
"""For each process: when it begins, and its pieces of work."""


def ends(host: Host, plan: Plan, weights: tuple[float, ...] = ()) -> list[float]:
    """When each process is done with all of its pieces. `weights`: of the first of them; the others have 1."""

    async def one(process: Process, begin_s: float, pieces: list[float]) -> float:
        await asyncio.sleep(begin_s)
        for piece in pieces:
            await process.work(piece)
        return asyncio.get_running_loop().time()

    async def main() -> list[float]:
        each = [*weights, *[1.0] * (len(plan) - len(weights))]
        processes = [Process(host, f"process-{index}", weight=weight) for index, weight in enumerate(each)]
        return list(await asyncio.gather(*(one(process, *how) for process, how in zip(processes, plan, strict=True))))

    return loop.run(main())


def test_who_is_alone_has_a_core_and_more_than_cores_share_them() -> None:
    assert ends(Host(2), [(0.0, [1.0, 2.0])]) == pytest.approx([3.0])
    assert ends(Host(2), [(0.0, [1.0])] * 2) == pytest.approx([1.0] * 2)
    assert ends(Host(2), [(0.0, [1.0])] * 4) == pytest.approx([2.0] * 4)
    # two for a second alone, then four: 2 x 1 s are left of it, and all have half a core
    assert ends(Host(2), [(0.0, [2.0])] * 2 + [(1.0, [3.0])] * 2) == pytest.approx([3.0, 3.0, 5.0, 5.0])


def test_the_first_ones_go_first() -> None:
    assert ends(Host(1), [(0.0, [1.0]), (0.0, [1.0])], (FIRST,))[0] == pytest.approx(1.0)
    assert ends(Host(1), [(0.0, [1.0]), (0.0, [1.0])], (FIRST,))[1] == pytest.approx(2.0, rel=0.03)


def test_the_others_share_by_their_weights_and_none_has_more_than_a_core() -> None:
    assert ends(Host(1), [(0.0, [0.75]), (0.0, [0.5])], (0.5,)) == pytest.approx([1.25, 0.75])
    # one core for the heavy one, the other core for the two that stand back
    assert ends(Host(2), [(0.0, [1.0])] * 3, (0.4, 0.4)) == pytest.approx([1.5, 1.5, 1.0])
    assert ends(Host(2), [(0.0, [2.0])] * 3, (FIRST, 0.2))[0] == pytest.approx(2.0)


def test_cores_that_are_all_busy_are_slower_where_that_was_measured() -> None:
    assert ends(Host(2, together=0.8), [(0.0, [0.8])] * 2) == pytest.approx([1.0] * 2)
    assert ends(Host(2, together=0.8), [(0.0, [0.8])]) == pytest.approx([0.8])


@settings(max_examples=60, deadline=None)
@given(
    cores=st.floats(0.5, 4.0),
    plan=st.lists(
        st.tuples(st.floats(0, 3), st.lists(st.floats(0.001, 2), min_size=1, max_size=4)), min_size=1, max_size=6
    ),
)
def test_no_work_is_lost_or_done_faster_than_the_cores_can(cores: float, plan: Plan) -> None:
    host = Host(cores)
    done = ends(host, plan)
    work_s = sum(sum(pieces) for _, pieces in plan)
    assert host.core_s == pytest.approx(work_s, rel=1e-6)
    assert max(done) * cores >= work_s * (1 - 1e-6)
    for (begin_s, pieces), end_s in zip(plan, done, strict=True):
        assert end_s >= begin_s + sum(pieces) / min(1.0, cores) * (1 - 1e-6)
    slowest_s = max(begin for begin, _ in plan) + work_s / min(1.0, cores)
    assert max(done) <= slowest_s * (1 + 1e-6)


def test_work_of_one_process_has_its_turn_in_order_or_within_a_limit() -> None:
    async def main() -> list[str]:
        process, order = Process(Host(2), "worker"), list[str]()
        for name in "abc":
            process.do(1.0, lambda name=name: order.append(name))  # type: ignore[misc]
        process.do(0.1, lambda: order.append("soon"), within_s=1.0)
        await asyncio.sleep(10)
        return order

    # a is under way, b is what it may wait for
    assert loop.run(main()) == ["a", "b", "soon", "c"]


def test_what_a_piece_takes_may_be_said_when_it_begins() -> None:
    async def main() -> tuple[list[str], float]:
        process, gathered, took = Process(Host(2), "worker"), list[str](), list[str]()

        def pack() -> float:
            took.extend(gathered)
            return 0.5 * len(gathered)

        process.do(1.0, lambda: None)
        process.do(pack, lambda: None)
        gathered.append("while the first is under way")
        await asyncio.sleep(1.25)
        gathered.append("too late")
        await asyncio.sleep(10)
        return took, process.used_s

    assert loop.run(main()) == (["while the first is under way"], 1.5)


@pytest.mark.parametrize(("cores", "together"), [(0.0, 1.0), (float("nan"), 1.0), (2.0, 0.0), (2.0, 1.6)])
def test_a_host_that_cannot_be_is_refused(cores: float, together: float) -> None:
    with pytest.raises(ConfigError, match="cores above 0"):
        Host(cores, together=together)
