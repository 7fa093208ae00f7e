"""What a task gives away without learning: success of random actions and of the best constant answer.

The random episodes are also the warm start's data: they show the format of a turn and nothing of what is right in it.
Invariant: an action in a transcript is drawn blind to the state and to the problem, uniformly over all well-formed actions,
so the data hold the answer exactly as often as chance. Episodes go through the same `TextSession` as rollouts, so
the transcripts are what the engine would have read and sampled.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from rollart.config.schema import Deadlines, TaskConfig
from rollart.core.errors import ConfigError, EnvError, ScorerError
from rollart.core.seeds import rng, seed_of
from rollart.core.types import Failure, Observation, TaskSpec
from rollart.runtime.envs.episodes import Table, play
from rollart.runtime.envs.session import TextSession, evidence_text
from rollart.runtime.envs.text import TextTask
from rollart.runtime.payload import TokenPayload, ids_of
from rollart.runtime.tokenizers import Ids, Tokenizer

MAX_CONSTANT_EPISODES = 4096
"""Instances on which each constant answer is tried; all of them for most tasks, and enough for 1 % on larger ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcript:
    """One random episode as the policy would have lived it."""

    ids: Ids
    """Shape (n_tokens,)."""
    sampled: NDArray[np.bool_]
    """Shape (n_tokens,): True for the tokens of actions, turn ends included; the others were written by the environment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomBaseline:
    success: float
    episodes: int
    """That the share of successes rests on."""
    transcripts: tuple[Transcript, ...]
    """Of all episodes that were played, those first."""
    failures: tuple[Failure, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstantBaseline:
    success: float
    """Of the best answer."""
    episodes: int
    """Instances that it was tried on."""
    answer: str
    failures: tuple[Failure, ...]


async def random_baseline(
    spec: TaskSpec, task: TaskConfig, tokenizer: Tokenizer, *, deadlines: Deadlines, episodes: int, scored: int, seed: int
) -> RandomBaseline | None:  # fmt: skip
    """Play `episodes` training instances with random actions; the first `scored` of them are the baseline.

    None: the task knows no random action. Raises RunFailed and ConfigError as `episodes.play` does.
    """

    def asks(table: Table, number: int, failed: int) -> bool:
        table.clock.call("random_action", deadlines.env_step_s)
        return table.env.random_action(rng(seed, "random_action", spec.name)) is not None

    asked = await play(spec, task, deadlines, 1, asks)
    if not asked.outcomes[0]:
        return None
    order = list(spec.train)
    rng(seed, "random_baseline", spec.name).shuffle(order)

    def one(table: Table, number: int, failed: int) -> tuple[float, Transcript]:
        names = (spec.name, number, *_again(failed))
        action = partial(_blind, table.env, rng(seed, "random_action", *names))
        problem = order[(number + failed) % len(order)]
        return _episode(spec, tokenizer, table, problem, seed_of(seed, "chance", *names), action)

    played = await play(spec, task, deadlines, episodes, one)
    results = [played.outcomes[number] for number in sorted(played.outcomes)]
    rewards = [reward for reward, _ in results[:scored]]
    return RandomBaseline(
        success=sum(reward >= spec.success_at for reward in rewards) / len(rewards),
        episodes=len(rewards),
        transcripts=tuple(transcript for _, transcript in results),
        failures=(*asked.failures, *played.failures),
    )


async def constant_baseline(
    spec: TaskSpec, task: TaskConfig, tokenizer: Tokenizer, *, deadlines: Deadlines, seed: int,
    limit: int = MAX_CONSTANT_EPISODES,
) -> ConstantBaseline | None:  # fmt: skip
    """Play every candidate of `constant_answers` on all instances, or on `limit` random ones, blind.

    None: no candidate. Raises RunFailed and ConfigError as `episodes.play` does.
    """

    def asks(table: Table, number: int, failed: int) -> list[tuple[str, ...]]:
        table.clock.call("constant_answers", deadlines.env_step_s)
        return [tuple(answer) for answer in table.env.constant_answers()]

    asked = await play(spec, task, deadlines, 1, asks)
    answers = asked.outcomes[0]
    if not answers:
        return None
    problems = [*spec.train, *spec.held_out]
    if len(problems) > limit:
        problems = rng(seed, "constant_baseline", spec.name).sample(problems, limit)

    def one(table: Table, number: int, failed: int) -> float:
        index, which = divmod(
            number, len(answers)
        )  # answers one after another: to begin the same problem again is cheap
        chance = seed_of(seed, "chance", spec.name, index, *_again(failed))
        action = itertools.cycle(answers[which]).__next__
        return _episode(spec, tokenizer, table, problems[index], chance, action)[0]

    played = await play(spec, task, deadlines, len(problems) * len(answers), one)
    tried, successes = [0] * len(answers), [0] * len(answers)
    for number, reward in played.outcomes.items():
        tried[number % len(answers)] += 1
        successes[number % len(answers)] += reward >= spec.success_at
    shares = [won / max(1, of) for won, of in zip(successes, tried, strict=True)]
    best = max(range(len(answers)), key=shares.__getitem__)
    return ConstantBaseline(
        success=shares[best], episodes=tried[best], answer=" ".join(answers[best]),
        failures=(*asked.failures, *played.failures),
    )  # fmt: skip


def _again(failed: int) -> tuple[int, ...]:
    """What is added to the name of a draw when an episode is drawn again."""
    return (failed,) if failed else ()


def _episode(
    spec: TaskSpec, tokenizer: Tokenizer, table: Table, seed: int, chance_seed: int, next_action: Callable[[], str]
) -> tuple[float, Transcript]:
    """Play one episode within the task's limits; its reward and transcript."""
    session, clock = TextSession(table.env, tokenizer), table.clock
    turn_end = np.asarray(tokenizer.turn_end_ids, np.int32)
    clock.call("reset", clock.deadlines.env_open_s)
    observation = session.reset(seed, chance_seed)
    pieces = [(_ids(observation), False)]
    evidence = [observation.evidence]
    metrics: dict[str, float] = {}
    total = 0.0
    for _ in range(spec.max_turns):
        clock.call("step", clock.deadlines.env_step_s)
        action = np.concatenate([tokenizer.encode(next_action()), turn_end])
        if len(action) > spec.max_tokens:
            raise ConfigError(
                f"tasks.{spec.name}.max_tokens={spec.max_tokens}: the action {tokenizer.decode(action)!r} needs "
                f"{len(action)} tokens, its end included; use max_tokens={len(action)} or more"
            )
        if sum(len(ids) for ids, _ in pieces) + spec.max_tokens > spec.max_context:
            break
        observation = session.step(action)
        branch = observation.new_segment
        if branch is None:
            pieces += [(action, True), (_ids(observation), False)]
        else:  # what was done before stands in it as context
            pieces = [(ids_of(branch), False)]
        evidence.append(observation.evidence)
        metrics.update(observation.metrics)
        total += observation.reward or 0.0
        if observation.terminated or observation.truncated:
            break
    if not pieces[-1][1] and len(pieces) > 1:
        pieces.pop()  # nobody reads on after the last action
    if table.scorer is not None:
        clock.call("the scorer", clock.deadlines.score_s, "scorer")
        total = _scored(table.scorer(evidence_text(evidence), metrics))
    return total, _transcript(pieces)


def _blind(env: TextTask, draw: random.Random) -> str:
    return env.random_action(draw) or ""


def _ids(observation: Observation) -> Ids:
    payload = observation.tokens.payload
    if not isinstance(payload, TokenPayload):
        raise EnvError("an observation of a text session carries token ids")
    return payload.ids


def _scored(value: float | Failure) -> float:
    if isinstance(value, Failure):
        raise ScorerError(value.detail)
    return value


def _transcript(pieces: Sequence[tuple[Ids, bool]]) -> Transcript:
    return Transcript(
        ids=np.concatenate([ids for ids, _ in pieces]),
        sampled=np.concatenate([np.full(len(ids), sampled) for ids, sampled in pieces]),
    )
