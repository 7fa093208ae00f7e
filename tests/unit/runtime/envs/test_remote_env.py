"""The environment and scorer ports: what is given up is freed, and a lost host is told to each asker in its own words."""

from __future__ import annotations

import asyncio
import pickle

from rollart.config.schema import CharsTokenizer, EnvHostConfig, TaskConfig
from rollart.core.types import Failure, GroupId, TaskInstance, Trajectory, TrajId
from rollart.runtime.actors import InlineActors
from rollart.runtime.envs.actor import EnvHostActor
from rollart.runtime.envs.host import Call, Close, Open, Score
from rollart.runtime.envs.remote import RemoteEnv, RemoteSession

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
        env = RemoteEnv(lambda name, why, left: None, seed=0)
        env.add("host-0", InlineActors().start(Deaf, calls))
        opening = asyncio.ensure_future(env.open(INSTANCE, traj=TrajId("t"), attempt=0, deadline_s=1e9))
        await asyncio.sleep(0.02)
        assert env._hosts[0].sessions == 1
        opening.cancel()
        await asyncio.wait({opening})
        await asyncio.sleep(0.02)
        assert opening.cancelled()
        assert env._hosts[0].sessions == 0
        assert [type(one) for one in calls] == [Open, Close]
        env.drop("host-0")

    asyncio.run(main())


def test_what_a_lost_host_was_asked_to_score_is_unscored() -> None:
    async def main() -> None:
        calls: list[Call] = []
        handle = InlineActors().start(Deaf, calls)
        env = RemoteEnv(lambda name, why, left: None, seed=0)
        env.add("host-0", handle)
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


def test_without_a_host_nothing_opens_or_is_scored_until_one_comes() -> None:
    async def main() -> None:
        calls: list[Call] = []
        told: list[tuple[str, int]] = []
        env = RemoteEnv(lambda name, why, left: told.append((name, left)), seed=0)
        none = (
            await env.open(INSTANCE, traj=TrajId("t"), attempt=0, deadline_s=1e9),
            await env.score(trajectory(), deadline_s=1e9),
        )
        assert [(one.where, one.kind, one.retryable) for one in none if isinstance(one, Failure)] == [
            ("env", "lost", True), ("scorer", "lost", True),
        ]  # fmt: skip
        handle = InlineActors().start(Deaf, calls)
        env.add("host-0", handle)
        opening = asyncio.ensure_future(env.open(INSTANCE, traj=TrajId("t"), attempt=1, deadline_s=1e9))
        await asyncio.sleep(0.02)
        assert [type(one) for one in calls] == [Open]
        InlineActors().kill(handle)
        assert isinstance(await opening, Failure)
        assert told == [("host-0", 0)]
        again = InlineActors().start(Deaf, calls)
        env.add("host-1", again)
        opening = asyncio.ensure_future(env.open(INSTANCE, traj=TrajId("t"), attempt=2, deadline_s=1e9))
        await asyncio.sleep(0.02)
        env.drop("host-1")
        env.drop("host-7")
        why = await opening
        assert isinstance(why, Failure)
        assert (why.kind, why.detail) == ("lost", "host-1 was released")
        assert told == [("host-0", 0)]

    asyncio.run(main())


class Mad(Deaf):
    """Answers what cannot be read."""

    async def poll(self, wait_s: float) -> bytes:
        await asyncio.sleep(0.02)
        return b"?"


def test_however_a_host_is_lost_its_sessions_are_lost_with_it() -> None:
    async def main() -> None:
        told: list[Failure] = []
        env = RemoteEnv(lambda name, why, left: told.append(why), seed=0)
        env.add("host-0", InlineActors().start(Mad, []))
        why = await env.open(INSTANCE, traj=TrajId("t"), attempt=0, deadline_s=1e9)
        assert isinstance(why, Failure)
        assert (why.where, why.kind, why.retryable) == ("env", "lost", True)
        assert told[0].kind == "raised"

    asyncio.run(main())


def test_a_close_that_is_not_sent_any_more_leaves_no_session_open() -> None:
    """The host is released while a close waits for the next batch: it closes what it holds itself."""

    async def main() -> None:
        tasks = {"echo": TaskConfig.model_validate({"env": {"kind": "max_digit"}})}
        handle = InlineActors().start(EnvHostActor, tasks, CharsTokenizer(), EnvHostConfig())
        await handle.start.remote()
        env = RemoteEnv(lambda name, why, left: None, seed=0)
        env.add("host-0", handle)
        session = await env.open(INSTANCE, traj=TrajId("t"), attempt=0, deadline_s=1e9)
        assert isinstance(session, RemoteSession)
        host = handle._actor._host
        await session.close()
        env.drop("host-0")
        await asyncio.sleep(0.02)
        assert host.facts().held == 1
        await handle.close.remote()
        assert host.facts().held == 0

    asyncio.run(main())
