"""One environment for one trajectory, in tokens: the only place where text becomes ids and ids become an action.

Invariant: nothing is re-tokenised. Ids that the engine sampled come in, are decoded to read the action, and are never
encoded again; what goes out are the ids of the new text only, so context + action + observation is exactly what the
engine reads next. The template is plain and append-only (it never opens a new segment): text, action, turn end, text.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from rollart.core.errors import EnvError
from rollart.core.types import Observation, Tokens
from rollart.runtime.envs.text import StepResult, TextTask
from rollart.runtime.payload import TokenPayload
from rollart.runtime.tokenizers import TURN_END, Ids, Tokenizer


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

    __slots__ = ("_stop_ids", "_tokenizer", "_turn_end", "env")

    def __init__(self, env: TextTask, tokenizer: Tokenizer) -> None:
        self.env = env
        self._tokenizer = tokenizer
        self._stop_ids = frozenset(tokenizer.stop_ids)
        self._turn_end = np.asarray(tokenizer.turn_end_ids, np.int32)

    def reset(self, seed: int, chance_seed: int) -> Observation:
        """Begin an episode. `seed` decides the problem, `chance_seed` what is random within it."""
        self.env.seed_chance(chance_seed)
        text = self.env.reset(seed)
        if not isinstance(text, str):
            raise EnvError(f"reset returned {type(text).__name__}, not str")
        text = str(text)
        ids = self._tokenizer.encode(text)
        begin = self._tokenizer.begin_ids
        if begin:
            ids = np.concatenate([np.asarray(begin, np.int32), ids])
        if not len(ids):
            raise EnvError("reset returned an empty text; the model needs at least one token to go on from")
        return Observation(tokens=_given(ids), evidence=TurnText("", text))

    def step(self, action: Ids) -> Observation:
        """Act with the sampled ids of one turn, shape (n,), stop token included if there was one.

        A turn that was cut before its stop token is ended here, by tokens that are not sampled. After the last
        observation nothing is read or trained, so it has no tokens; its text is in the evidence.
        """
        stopped = len(action) > 0 and int(action[-1]) in self._stop_ids
        text = self._tokenizer.decode(action[:-1] if stopped else action)
        result = self.env.step(text)
        if not isinstance(result, StepResult):
            raise EnvError(f"step returned {type(result).__name__}, not StepResult")
        over = bool(result.terminated or result.truncated)
        reply, reward, metrics = _plain(result)
        ids = _NO_IDS if over else self._tokenizer.encode(reply)
        if not (over or stopped):
            ids = np.concatenate([self._turn_end, ids])
        return Observation(
            tokens=_given(ids),
            terminated=bool(result.terminated),
            truncated=bool(result.truncated),
            reward=reward,
            bad_action=bool(result.bad_action),
            evidence=TurnText(text.removesuffix(TURN_END), reply),
            metrics=metrics,
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


def _given(ids: Ids) -> Tokens:
    """A piece that the environment wrote."""
    return Tokens(n_tokens=len(ids), payload=TokenPayload(ids=ids))
