"""The environment and scorer ports: what is given up is freed, and a lost host is told to each asker in its own words."""

from __future__ import annotations

import asyncio
import pickle

from rollart.core.types import Failure, GroupId, TaskInstance, Trajectory, TrajId
from rollart.runtime.actors import InlineActors
from rollart.runtime.envs.host import Call, Close, Open, Score
from rollart.runtime.envs.remote import RemoteEnv

INSTANCE = TaskInstance(task="echo", epoch=0, index=0, seed=0)


class Deaf:
    """Takes calls and answers none."""

    def __init__(self, calls: list[Call]) -> None:
        self.calls = calls

    async def submit(self, blob: bytes) -> None:
        self.calls += pickle.loads(blob)

    async def poll(self, wait_s: float) -> bytes:
        await asyncio.sleep(wait_s)
        return pickle.dumps([])


def trajectory() -> Trajectory:
    return Trajectory(
        id=TrajId("t"), attempt=0, group_id=GroupId("g"), instance=INSTANCE, member=0, segments=(), status="done",
        finish_cause="env_done",
    )  # fmt: skip


def test_an_open_that_is_given_up_takes_no_place_on_its_host() -> None:
    async def main() -> None:
        calls: list[Call] = []
        env = RemoteEnv({"host-0": InlineActors().start(Deaf, calls)}, lambda name, why, left: None, seed=0)
        env.start()
        opening = asyncio.ensure_future(env.open(INSTANCE, traj=TrajId("t"), attempt=0, deadline_s=1e9))
        await asyncio.sleep(0.02)
        assert env._hosts[0].sessions == 1
        opening.cancel()
        await asyncio.wait({opening})
        await asyncio.sleep(0.02)
        assert opening.cancelled()
        assert env._hosts[0].sessions == 0
        assert [type(one) for one in calls] == [Open, Close]
        env.stop()

    asyncio.run(main())


def test_what_a_lost_host_was_asked_to_score_is_unscored() -> None:
    async def main() -> None:
        calls: list[Call] = []
        handle = InlineActors().start(Deaf, calls)
        env = RemoteEnv({"host-0": handle}, lambda name, why, left: None, seed=0)
        env.start()
        scoring = asyncio.ensure_future(env.score(trajectory(), deadline_s=1e9))
        opening = asyncio.ensure_future(env.open(INSTANCE, traj=TrajId("t"), attempt=0, deadline_s=1e9))
        await asyncio.sleep(0.02)
        [score] = [one for one in calls if isinstance(one, Score)]
        [session] = [one for one in calls if isinstance(one, Open)]
        assert score.session != session.session
        InlineActors().kill(handle)
        outcomes = (await scoring, await opening, await env.score(trajectory(), deadline_s=1e9))
        assert [(one.where, one.kind) for one in outcomes if isinstance(one, Failure)] == [
            ("scorer", "lost"), ("env", "lost"), ("scorer", "lost"),
        ]  # fmt: skip

    asyncio.run(main())
