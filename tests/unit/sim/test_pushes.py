"""How versions get into the store: one push at a time, the newest next, and nobody falls behind for ever."""

from __future__ import annotations

import asyncio
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from rollart.core.resources import EngineInfo
from rollart.core.types import Manifest
from rollart.sim.engine import EngineModel, SimEngine
from rollart.sim.loop import run
from rollart.sim.pushes import Bytes, Pushes
from rollart.sim.trainer import SimTrainer, TrainerModel

PUSH_S = 10.0


def pushed(at_s: list[float], push_s: float = PUSH_S) -> tuple[list[float], list[bool]]:
    """When it was said of each that it is there or never will be, and which never are."""
    ends: dict[int, float] = {}
    made: list[Bytes] = []

    async def wait(index: int, published: Bytes) -> None:
        await published.there.wait()
        ends[index] = asyncio.get_running_loop().time()

    async def main() -> None:
        pushes, waits = Pushes(push_s), list[asyncio.Task[None]]()
        for index, at in enumerate(at_s):
            await asyncio.sleep(at - asyncio.get_running_loop().time())
            made.append(pushes.begin())
            waits.append(asyncio.create_task(wait(index, made[-1])))
        await asyncio.gather(*waits)

    run(main())
    return [ends[index] for index in range(len(at_s))], [published.overtaken for published in made]


def test_a_version_alone_takes_its_push_and_the_next_one_waits_for_it() -> None:
    assert pushed([0.0, 4.0, 50.0]) == ([10.0, 20.0, 60.0], [False, False, False])


def test_of_versions_that_wait_the_newest_goes_next_and_the_others_never() -> None:
    ends, overtaken = pushed([0.0, 3.0, 6.0, 9.0, 12.0])
    assert overtaken == [False, True, True, False, False]
    assert ends == [10.0, 10.0, 10.0, 20.0, 30.0]


def test_a_version_of_the_instant_in_which_a_push_ends_overtakes_nobody() -> None:
    ends, overtaken = pushed([0.0, 5.0, 10.0])
    assert (ends, overtaken) == ([10.0, 20.0, 30.0], [False, False, False])


def test_where_nothing_is_pushed_all_is_there_at_once() -> None:
    assert pushed([0.0, 1.0], push_s=0.0) == ([0.0, 1.0], [False, False])


@given(st.lists(st.floats(0.1, 15.0), min_size=1, max_size=20))
def test_whatever_comes_a_version_is_there_or_overtaken_within_two_pushes(gaps: list[float]) -> None:
    at_s = [sum(gaps[: n + 1]) for n in range(len(gaps))]
    ends, overtaken = pushed(at_s)
    assert all(end - at <= 2 * PUSH_S + 1e-9 for at, end in zip(at_s, ends, strict=True))
    there = [end for end, late in zip(ends, overtaken, strict=True) if not late]
    assert there == sorted(there)
    assert all(later - earlier >= PUSH_S - 1e-9 for earlier, later in pairwise(there))
    assert not overtaken[-1]


INFO = EngineInfo(id="e", lease="l", pool="p", role="mixed", kv_tokens=1 << 20, fingerprint="bitwise", version=-1)


def test_an_engine_that_asks_for_an_overtaken_version_is_told() -> None:
    async def main() -> None:
        trainer, engine = SimTrainer(TrainerModel(push_s=PUSH_S)), SimEngine(INFO, EngineModel())
        beside = SimEngine(INFO, EngineModel(pushed=False))
        manifests: list[Manifest] = []
        for version in range(3):
            manifests.append(await trainer.publish(version))
            assert await beside.prefetch(manifests[-1]) is None, "it waits for no push"
            assert asyncio.get_running_loop().time() == version
            await asyncio.sleep(1.0)
        assert [await engine.prefetch(manifest) for manifest in manifests[:1]] == [None]
        assert asyncio.get_running_loop().time() == PUSH_S
        why = await engine.prefetch(manifests[1])
        assert why is not None
        assert (why.where, why.kind) == ("store", "missing")
        assert await engine.prefetch(manifests[2]) is None
        assert asyncio.get_running_loop().time() == 2 * PUSH_S

    run(main())


def test_bytes_that_are_lost_with_their_trainer_keep_nobody_waiting() -> None:
    async def main() -> None:
        trainer, engine = SimTrainer(TrainerModel(push_s=PUSH_S, bytes_die=True)), SimEngine(INFO, EngineModel())
        manifest = await trainer.publish(0)
        asked = asyncio.ensure_future(engine.prefetch(manifest))
        await asyncio.sleep(1.0)
        trainer.die("it is gone")
        why = await asked
        assert why is not None
        assert (why.where, why.kind) == ("store", "missing")
        assert asyncio.get_running_loop().time() == 1.0

    run(main())
