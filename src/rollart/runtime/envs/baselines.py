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

from rollart.config.schema import TaskConfig
from rollart.core.errors import ConfigError, EnvError
from rollart.core.seeds import rng, seed_of
from rollart.core.types import Failure, Observation, TaskSpec
from rollart.runtime.envs.scorers import build_scorer
from rollart.runtime.envs.session import TextSession, evidence_text
from rollart.runtime.envs.tasks import build_env
from rollart.runtime.envs.text import TextTask
from rollart.runtime.payload import TokenPayload
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
    transcripts: tuple[Transcript, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstantBaseline:
    success: float
    """Of the best answer."""
    episodes: int
    """Instances that each answer was tried on."""
    answer: str


def random_baseline(
    spec: TaskSpec, task: TaskConfig, tokenizer: Tokenizer, *, episodes: int, seed: int
) -> RandomBaseline | None:
    """Play `episodes` training instances with random actions. None: the task knows no random action."""
    env = build_env(task)
    play = _player(spec, task, TextSession(env, tokenizer), tokenizer)
    if env.random_action(rng(seed, "random_action", spec.name)) is None:
        env.close()
        return None
    order = list(spec.train)
    rng(seed, "random_baseline", spec.name).shuffle(order)
    transcripts: list[Transcript] = []
    successes = 0
    for episode in range(episodes):
        draw = rng(seed, "random_action", spec.name, episode)
        chance = seed_of(seed, "chance", spec.name, episode)
        reward, transcript = play(order[episode % len(order)], chance, partial(_blind, env, draw))
        successes += reward >= spec.success_at
        transcripts.append(transcript)
    env.close()
    return RandomBaseline(success=successes / episodes, episodes=episodes, transcripts=tuple(transcripts))


def constant_baseline(
    spec: TaskSpec, task: TaskConfig, tokenizer: Tokenizer, *, seed: int, limit: int = MAX_CONSTANT_EPISODES
) -> ConstantBaseline | None:
    """Play every candidate of `constant_answers` on all instances, or on `limit` random ones, blind. None: no candidate."""
    env = build_env(task)
    play = _player(spec, task, TextSession(env, tokenizer), tokenizer)
    problems = [*spec.train, *spec.held_out]
    if len(problems) > limit:
        problems = rng(seed, "constant_baseline", spec.name).sample(problems, limit)
    answers = [tuple(answer) for answer in env.constant_answers()]
    successes = [0] * len(answers)
    for index, problem in enumerate(problems):
        chance = seed_of(seed, "chance", spec.name, index)
        for which, answer in enumerate(answers):  # the inner loop: to begin the same problem again is cheap
            reward, _ = play(problem, chance, itertools.cycle(answer).__next__)
            successes[which] += reward >= spec.success_at
    env.close()
    if not answers:
        return None
    best = max(range(len(answers)), key=successes.__getitem__)
    return ConstantBaseline(
        success=successes[best] / len(problems), episodes=len(problems), answer=" ".join(answers[best])
    )


Play = Callable[[int, int, Callable[[], str]], tuple[float, Transcript]]


def _player(spec: TaskSpec, task: TaskConfig, session: TextSession, tokenizer: Tokenizer) -> Play:
    """A function (seed, chance seed, next action) -> (reward, transcript) that plays one episode within the task's limits."""
    scorer = build_scorer(task.scorer) if task.scorer is not None else None
    turn_end = np.asarray(tokenizer.turn_end_ids, np.int32)

    def play(seed: int, chance_seed: int, next_action: Callable[[], str]) -> tuple[float, Transcript]:
        observation = session.reset(seed, chance_seed)
        pieces = [(_ids(observation), False)]
        evidence = [observation.evidence]
        metrics: dict[str, float] = {}
        total = 0.0
        for _ in range(spec.max_turns):
            action = np.concatenate([tokenizer.encode(next_action()), turn_end])
            if len(action) > spec.max_tokens:
                raise ConfigError(
                    f"tasks.{spec.name}.max_tokens={spec.max_tokens}: the action {tokenizer.decode(action)!r} needs "
                    f"{len(action)} tokens, its end included; use max_tokens={len(action)} or more"
                )
            if sum(len(ids) for ids, _ in pieces) + spec.max_tokens > spec.max_context:
                break
            observation = session.step(action)
            pieces += [(action, True), (_ids(observation), False)]
            evidence.append(observation.evidence)
            metrics.update(observation.metrics)
            total += observation.reward or 0.0
            if observation.terminated or observation.truncated:
                break
        if not pieces[-1][1] and len(pieces) > 1:
            pieces.pop()  # nobody reads on after the last action
        if scorer is not None:
            total = _scored(scorer(evidence_text(evidence), metrics))
        return total, _transcript(pieces)

    return play


def _blind(env: TextTask, draw: random.Random) -> str:
    return env.random_action(draw) or ""


def _ids(observation: Observation) -> Ids:
    payload = observation.tokens.payload
    if not isinstance(payload, TokenPayload):
        raise EnvError("an observation of a text session carries token ids")
    return payload.ids


def _scored(value: float | Failure) -> float:
    if isinstance(value, Failure):
        raise EnvError(f"the scorer failed on a random episode: {value.detail}")
    return value


def _transcript(pieces: Sequence[tuple[Ids, bool]]) -> Transcript:
    return Transcript(
        ids=np.concatenate([ids for ids, _ in pieces]),
        sampled=np.concatenate([np.full(len(ids), sampled) for ids, sampled in pieces]),
    )
