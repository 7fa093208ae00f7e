"""The contract of the environment port and its sessions."""

from __future__ import annotations

import asyncio
import inspect
import sys

from rigs import EnvRig

from rollart.core.types import Failure, Observation, TaskInstance, TrajId
from rollart.ports import Session


def soon(rig: EnvRig) -> float:
    return asyncio.get_running_loop().time() + rig.step_s


async def opened(rig: EnvRig, instance: TaskInstance, name: str = "train/t/0/0/0", attempt: int = 0) -> Session:
    session = await rig.env.open(instance, traj=TrajId(name), attempt=attempt, deadline_s=soon(rig))
    assert not isinstance(session, Failure), session
    return session


async def reset(rig: EnvRig, session: Session) -> Observation:
    observation = await session.reset(deadline_s=soon(rig))
    assert isinstance(observation, Observation), observation
    return observation


async def play(rig: EnvRig, session: Session) -> list[Observation]:
    """All observations of one episode."""
    seen = [await reset(rig, session)]
    for _ in range(rig.most_turns):
        observation = await session.step(rig.act(seen[-1]), deadline_s=soon(rig))
        assert isinstance(observation, Observation), observation
        seen.append(observation)
        if observation.terminated or observation.truncated:
            return seen
    raise AssertionError(f"no end after {rig.most_turns} turns")


async def an_episode_begins_with_a_prompt_and_ends_with_a_reward(rig: EnvRig) -> None:
    session = await opened(rig, rig.instance(0))
    first, *rest = await play(rig, session)
    await session.close()
    assert session.host
    assert first.tokens.n_tokens > 0
    assert not first.tokens.spans, "the environment's words were not sampled"
    assert not first.terminated
    rewards = [observation.reward for observation in rest if observation.reward is not None]
    assert rewards
    assert await rig.sessions() == 0


async def sessions_do_not_meet(rig: EnvRig) -> None:
    instances = [rig.instance(n % 3) for n in range(20)]
    sessions = [await opened(rig, instance, f"train/t/0/{n}/0") for n, instance in enumerate(instances)]
    assert await rig.sessions() == 20
    episodes = await asyncio.gather(*(play(rig, session) for session in sessions))
    for n, episode in enumerate(episodes):
        assert episode[0].tokens.n_tokens == episodes[n % 3][0].tokens.n_tokens, "the same problem, the same prompt"
    for session in sessions:
        await session.close()
    assert await rig.sessions() == 0


async def a_call_that_passes_its_deadline_is_a_timeout_and_the_sessions_last(rig: EnvRig) -> None:
    session = await opened(rig, rig.stuck)
    first = await reset(rig, session)
    late = await session.step(rig.act(first), deadline_s=soon(rig))
    assert isinstance(late, Failure)
    assert (late.where, late.kind) == ("env", "timeout")
    again = await session.step(rig.act(first), deadline_s=soon(rig))
    assert isinstance(again, Failure)
    await session.close()
    assert await rig.sessions() == 0


async def a_stuck_session_holds_no_other_up(rig: EnvRig) -> None:
    stuck = await opened(rig, rig.stuck, "train/t/0/0/0")
    first = await reset(rig, stuck)
    hanging = asyncio.create_task(stuck.step(rig.act(first), deadline_s=soon(rig)))
    session = await opened(rig, rig.instance(0), "train/t/0/1/0")
    assert len(await play(rig, session)) > 1
    assert isinstance(await hanging, Failure)
    await stuck.close()
    await session.close()
    assert await rig.sessions() == 0


async def an_environment_that_raises_is_a_failure_with_what_it_raised(rig: EnvRig) -> None:
    session, other = (
        await opened(rig, rig.raising, "train/t/0/0/0"),
        await opened(rig, rig.instance(0), "train/t/0/1/0"),
    )
    first = await reset(rig, session)
    raised = await session.step(rig.act(first), deadline_s=soon(rig))
    assert isinstance(raised, Failure)
    assert (raised.where, raised.kind) == ("env", "raised")
    assert raised.detail
    assert len(await play(rig, other)) > 1
    await session.close()
    await other.close()
    assert await rig.sessions() == 0


async def closing_is_idempotent_and_safe_before_the_first_reset(rig: EnvRig) -> None:
    session = await opened(rig, rig.instance(0))
    await session.close()
    await session.close()
    assert await rig.sessions() == 0


async def a_failed_open_leaves_nothing(rig: EnvRig) -> None:
    for attempt in range(3):
        why = await rig.env.open(rig.unopenable, traj=TrajId("train/t/0/0/0"), attempt=attempt, deadline_s=soon(rig))
        assert isinstance(why, Failure)
        assert why.where == "env"
    assert await rig.sessions() == 0


async def a_later_attempt_has_a_session_of_its_own(rig: EnvRig) -> None:
    first = await opened(rig, rig.instance(0), attempt=0)
    second = await opened(rig, rig.instance(0), attempt=1)
    await reset(rig, first)
    await first.close()
    assert len(await play(rig, second)) > 1
    await second.close()
    assert await rig.sessions() == 0


CONTRACTS = [
    contract
    for name, contract in inspect.getmembers(sys.modules[__name__], inspect.iscoroutinefunction)
    if contract.__module__ == __name__ and list(inspect.signature(contract).parameters) == ["rig"]
]
