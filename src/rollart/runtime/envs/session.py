"""One environment for one trajectory, in tokens: the only place where text becomes ids and ids become an action.

Invariant: nothing is re-tokenised. Ids that the engine sampled come in, are decoded to read the action, and are never
encoded again; what goes out are the ids of the new text only, so context + action + observation is exactly what the
engine reads next. How a turn is written is `turns.py`'s matter: plain text, or the model's own chat template.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from rollart.core.errors import EnvError
from rollart.core.types import Observation, Segment
from rollart.runtime.envs.text import StepResult, TextTask
from rollart.runtime.envs.turns import given, turns_of
from rollart.runtime.tokenizers import TURN_END, Ids, Tokenizer

SEGMENTS = "segments"
"""Metric of a chat: token sequences that the trajectory has; above 1 where the template changed what stood before."""


class TurnText(NamedTuple):
    """An observation's evidence: what was written and what came back. The first one of an episode has no action."""

    action: str
    reply: str


def evidence_text(evidence: Iterable[object]) -> str:
    """A trajectory's evidence as one text, as scorers and readers get it."""
    return "".join(
        turn.reply if index == 0 else f"{turn.action}\n{turn.reply}"
        for index, turn in enumerate(evidence)
        if isinstance(turn, TurnText)
    )


class TextSession:
    """Drives one `TextTask`. Methods raise what the environment raises, and EnvError when it breaks its contract."""

    __slots__ = ("_turns", "env")

    def __init__(self, env: TextTask, tokenizer: Tokenizer) -> None:
        self.env = env
        self._turns = turns_of(tokenizer)

    def reset(self, seed: int, chance_seed: int) -> Observation:
        """Begin an episode. `seed` decides the problem, `chance_seed` what is random within it."""
        self.env.seed_chance(chance_seed)
        text = self.env.reset(seed)
        if not isinstance(text, str):
            raise EnvError(f"reset returned {type(text).__name__}, not str")
        text = str(text)
        ids = self._turns.first(text)
        if not len(ids):
            raise EnvError("reset returned an empty text; the model needs at least one token to go on from")
        return Observation(tokens=given(ids), evidence=TurnText("", text))

    def step(self, action: Ids) -> Observation:
        """Act with the sampled ids of one turn, shape (n,), stop token included if there was one.

        A turn that was cut before its stop token is ended here, by tokens that are not sampled. After the last
        observation nothing is read or trained, so it has no tokens; its text is in the evidence.
        """
        text = self._turns.action(action)
        result = self.env.step(text)
        if not isinstance(result, StepResult):
            raise EnvError(f"step returned {type(result).__name__}, not StepResult")
        over = bool(result.terminated or result.truncated)
        reply, reward, metrics = _plain(result)
        new = _NO_IDS if over else self._turns.reply(action, reply)
        segments = self._turns.segments
        return Observation(
            tokens=given(_NO_IDS if isinstance(new, Segment) else new),
            new_segment=new if isinstance(new, Segment) else None,
            terminated=bool(result.terminated),
            truncated=bool(result.truncated),
            reward=reward,
            bad_action=bool(result.bad_action),
            evidence=TurnText(text.removesuffix(TURN_END), reply),
            metrics=metrics if segments is None else {SEGMENTS: float(segments), **metrics},
        )

    def close(self) -> None:
        self.env.close()


_NO_IDS = np.empty(0, np.int32)


def _plain(result: StepResult) -> tuple[str, float, dict[str, float]]:
    """Text, reward and metrics as plain values, which travel between processes whatever a user's class made them of."""
    if not isinstance(result.text, str):
        raise EnvError(f"step returned the text {result.text!r}, not a str")
    reward = float(result.reward)
    if not math.isfinite(reward):
        raise EnvError(f"step gave the reward {reward}; a reward is finite")
    try:
        metrics = {str(name): float(value) for name, value in result.metrics.items()}
    except (TypeError, ValueError) as error:
        raise EnvError(f"step gave the metrics {result.metrics!r}; each must be a number ({error})") from error
    return str(result.text), reward, metrics
