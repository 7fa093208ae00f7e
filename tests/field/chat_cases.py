"""What tests of chats share: a tokenizer trained on the spot, and rollouts of the real session with a real engine core."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch

from rollart.config.schema import ScratchModel
from rollart.control.fleet import Fleet
from rollart.control.rewards import Rewards
from rollart.control.rollout import Attempt, CallLimits, Rollout
from rollart.control.waits import Waits
from rollart.core.events import Recorder
from rollart.core.types import (
    Observation,
    Sampling,
    TaskInstance,
    TaskSpec,
    Tokens,
    Trajectory,
    TrajId,
    Turn,
    TurnFn,
    TurnRequest,
)
from rollart.observe.log import Event
from rollart.ports import Env
from rollart.runtime.engine.core import EngineCore
from rollart.runtime.envs.session import TextSession
from rollart.runtime.envs.text import StepResult, TextTask
from rollart.runtime.models import build_model, hf_config, named_weights
from rollart.runtime.payload import TokenPayload, ids_of
from rollart.runtime.tokenizers import Tokenizer

THINKING = (
    "{% for message in messages %}<|start|>{{ message.role }}\n"
    "{{ message.content.split('</think>')[-1] if message.role == 'assistant' else message.content }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
"""A template that drops what an assistant thought, as those of reasoning models do."""
SPECIAL = ("<|start|>", "<|end|>", "<think>", "</think>")
WORDS = ("user", "assistant", "system", "look", "go", "you see a lake", "turn", "0123456789", "\n", "<think></think>")


def thinking_bpe(folder: Path) -> str:
    """Train a BPE of 56 tokens, with `THINKING` as its template; returns its folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.train_from_iterator(
        [" ".join(WORDS)] * 4, trainers.BpeTrainer(vocab_size=56, special_tokens=list(SPECIAL), show_progress=False)
    )
    fast: Any = PreTrainedTokenizerFast
    made = fast(tokenizer_object=inner, eos_token="<|end|>", additional_special_tokens=["<|start|>"])
    made.chat_template = THINKING
    made.save_pretrained(folder)
    return str(folder)


class Counting(TextTask):
    """Says which turn it is, and goes on for ever."""

    def __init__(self) -> None:
        self.turn = 0

    def reset(self, seed: int) -> str:
        self.turn = 0
        return f"you see a lake {seed}\n"

    def step(self, action: str) -> StepResult:
        self.turn += 1
        return StepResult(f"turn {self.turn}\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the engine saw and sampled in one turn."""

    traj: TrajId
    context: tuple[int, ...]
    sampled: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(slots=True)
class CoreFleet:
    """Of `Fleet` what a rollout needs, straight on an engine core; keeps what the core was asked and answered."""

    core: EngineCore
    asked: list[Asked] = field(default_factory=list)

    async def turn(self, request: TurnRequest) -> Turn:
        self.core.submit([request])
        answers = []
        while self.core.has_work:
            answers += self.core.step()
        [(_, answer)] = answers
        assert answer.failure is None
        payload = answer.tokens.payload
        assert isinstance(payload, TokenPayload)
        assert payload.logprobs is not None
        self.asked.append(
            Asked(
                traj=request.id.traj, context=tuple(ids_of(request.context).tolist()),
                sampled=tuple(payload.ids.tolist()), logprobs=tuple(payload.logprobs.tolist()),
            )
        )  # fmt: skip
        return Turn(pieces=(answer.tokens,), finish=answer.finish)

    def forget(self, key: tuple[TrajId, int]) -> None:
        self.core.forget(*key)


@dataclass(slots=True)
class DirectSession:
    """`ports.Session` on a text session in this process."""

    inner: TextSession
    seed: int
    host: str = "here"

    async def reset(self, *, deadline_s: float) -> Observation:
        return self.inner.reset(self.seed, 0)

    async def step(self, action: tuple[Tokens, ...], *, deadline_s: float) -> Observation:
        [piece] = action
        assert isinstance(piece.payload, TokenPayload)
        return self.inner.step(piece.payload.ids)

    async def run(self, turn: TurnFn) -> Trajectory:
        raise NotImplementedError

    async def close(self) -> None:
        self.inner.close()


@dataclass(slots=True)
class DirectEnv:
    tokenizer: Tokenizer

    async def open(self, instance: TaskInstance, *, traj: TrajId, attempt: int, deadline_s: float) -> DirectSession:
        return DirectSession(TextSession(Counting(), self.tokenizer), instance.seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rolled:
    trajectories: Sequence[Trajectory]
    asked: Sequence[Asked]
    core: EngineCore
    events: Sequence[Event]


def roll(tokenizer: Tokenizer, *, episodes: int, turns: int, max_tokens: int) -> Rolled:
    """Play episodes of `Counting` with a tiny model of random weights, through the real control loop of a rollout."""
    torch.set_num_threads(1)
    shape = ScratchModel(layers=1, hidden=16, heads=2, kv_heads=1, ffn=32, max_positions=2048)
    config = hf_config(shape, tokenizer.vocab_size)
    core = EngineCore(config, max_live=4, kv_tokens=8192, prefill_tokens=512)
    core.load(1, named_weights(build_model(config, seed=3)))
    fleet, events = CoreFleet(core), list[Event]()

    async def play() -> list[Trajectory]:
        now = asyncio.get_running_loop().time
        record = Recorder((events.append,), now)
        waits = Waits(record)
        spec = TaskSpec(
            name="t", ratio=1.0, train=range(episodes), max_turns=turns, max_tokens=max_tokens, max_context=2048,
            stop_ids=tokenizer.stop_ids,
        )  # fmt: skip
        rollout = Rollout(
            record, waits, cast(Fleet, fleet), cast(Env, DirectEnv(tokenizer)), Rewards(waits, None, limit_s=60.0),
            limits=CallLimits(env_open_s=60.0, env_step_s=60.0, turn_s=60.0), tasks={"t": spec},
        )  # fmt: skip
        return [
            await rollout.attempt(
                Attempt(
                    instance=TaskInstance(task="t", epoch=0, index=index, seed=index), member=0, attempt=0,
                    work_until_s=now() + 60.0, close_until_s=now() + 60.0,
                    sampling=Sampling(seed=index, stop_ids=tokenizer.stop_ids),
                )
            )
            for index in range(episodes)
        ]  # fmt: skip

    trajectories = asyncio.run(play())
    return Rolled(trajectories=trajectories, asked=fleet.asked, core=core, events=events)
