"""The peer's side of `vs_trl.py`: TRL's GRPOTrainer on the tasks of `peers_tasks.py`, in the environment of `make trl-env`.

    .venv-trl/bin/python benchmarks/vs_trl_peer.py

Reads the path of a `Job` from each line of its input, writes the `Outcome` to the file that the job names, then says so in
a line. Episodes of several turns go through TRL's `rollout_func` with the environment's tokens masked by `env_mask`; their
text becomes tokens in the same `TextSession` as on our side. Invariant: nothing is compared here; the times of every step
are handed back as they were.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback

from peers_tasks import Lake, Letters
from rollart.config.schema import CharsTokenizer
from rollart.core.types import Tokens
from rollart.runtime.envs.session import TextSession
from rollart.runtime.envs.text import StepResult, TextTask
from rollart.runtime.payload import TokenPayload
from rollart.runtime.tokenizers import Chars

BATCH, GROUP = 64, 8
DONE = "outcome written"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What to run. One setting: a measurement; several: a sweep, each for `seconds`."""

    task: str
    """`letters`, or `lake` by turns."""
    model: str
    """Folder of the initial weights."""
    alphabet: str
    seeds: list[int]
    """Of the task's problems."""
    turns: int
    turn_tokens: int
    latency_s: float
    spread_s: float
    lr: float
    beta2: float
    seed: int
    warm_up: int
    seconds: float
    """After the warm-up, for each setting."""
    least: int
    """Steps after the warm-up, however short the time is."""
    settings: list[dict[str, Any]]
    """Of `threads` and `cache` (`dynamic` or `static`)."""
    outcome: str
    """The file to write to."""


@dataclass(slots=True, kw_only=True)
class Outcome:
    """For each setting: (released, finished, trajectories) of each step in seconds, and its mean reward."""

    steps: list[list[tuple[float, float, int]]] = field(default_factory=list)
    rewards: list[list[float]] = field(default_factory=list)
    began: list[float] = field(default_factory=list)
    """When the training of each setting began."""
    tokens: list[float] = field(default_factory=list)
    """Mean sampled tokens of a trajectory."""
    cpu_s: float = 0.0
    versions: dict[str, str] = field(default_factory=dict)


def tokenizer_of(alphabet: str) -> Any:
    """`rollart`'s Chars as a tokenizer of transformers: the same ids, the newline ends a text."""
    inner = Chars(CharsTokenizer(alphabet=alphabet))
    vocab = {text: index for index, text in enumerate(inner.decode([i]) for i in range(inner.vocab_size))}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    made.decoder = decoders.Fuse()
    pad = inner.decode([inner.pad_id])
    fast: Any = PreTrainedTokenizerFast
    return fast(tokenizer_object=made, eos_token="\n", pad_token=pad, padding_side="left")


class Watch(TrainerCallback):
    """Times every step, and stops the training when the time is over."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.generated_s = self.began_s = 0.0
        self.steps: list[tuple[float, float, int]] = []
        self.rewards: list[float] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.began_s = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.steps.append((self.generated_s, time.monotonic(), BATCH))
        warm = self.job.warm_up
        if len(self.steps) >= warm + self.job.least:
            control.should_training_stop = self.steps[-1][1] - self.steps[warm - 1][1] >= self.job.seconds

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if logs and "reward" in logs:
            self.rewards.append(float(logs["reward"]))


class Episodes:
    """TRL's `rollout_func`: a batch of episodes of several turns, all stepped together."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._chars = Chars(CharsTokenizer(alphabet=job.alphabet))
        self._stop = self._chars.stop_ids[0]
        self._played = 0

    def __call__(self, prompts: Sequence[str], trainer: Any) -> dict[str, Any]:
        lakes = [Lake(latency_s=self._job.latency_s, spread_s=self._job.spread_s) for _ in prompts]
        sessions = [TextSession(_Awake(lake), self._chars) for lake in lakes]
        contexts, rewards = list[list[int]](), [0.0] * len(prompts)
        for session, prompt in zip(sessions, prompts, strict=True):
            self._played += 1
            contexts.append(_ids(session.reset(int(prompt), self._played).tokens))
        prompt_ids = [list(context) for context in contexts]
        masks: list[list[int]] = [[] for _ in prompts]
        live = list(range(len(prompts)))
        trainer.generation_config.max_new_tokens = self._job.turn_tokens
        for _ in range(self._job.turns):
            if not live:
                break
            sampled = self._generate([contexts[index] for index in live], trainer)
            # all environments are stepped at once: the batch waits for the slowest and for nothing else
            time.sleep(max(lakes[index].draw_s() for index in live))
            going = []
            for index, ids in zip(live, sampled, strict=True):
                observation = sessions[index].step(np.asarray(ids, np.int32))
                given = _ids(observation.tokens)
                contexts[index] += ids + given
                masks[index] += [1] * len(ids) + [0] * len(given)
                rewards[index] += observation.reward or 0.0
                if not (observation.terminated or observation.truncated):
                    going.append(index)
            live = going
        for session in sessions:
            session.close()
        completions = [context[len(prompt) :] for context, prompt in zip(contexts, prompt_ids, strict=True)]
        return {
            "prompt_ids": prompt_ids, "completion_ids": completions, "logprobs": None, "env_mask": masks,
            "episode_reward": rewards,
        }  # fmt: skip

    @torch.no_grad()
    def _generate(self, contexts: Sequence[Sequence[int]], trainer: Any) -> list[list[int]]:
        """One turn of every context, sampled to the stop token or to the turn's length."""
        width = max(map(len, contexts))
        ids = torch.full((len(contexts), width), self._chars.pad_id)
        mask = torch.zeros_like(ids)
        for row, context in enumerate(contexts):
            ids[row, width - len(context) :] = torch.tensor(context)
            mask[row, width - len(context) :] = 1
        out = trainer.model.generate(input_ids=ids, attention_mask=mask, generation_config=trainer.generation_config)[
            :, width:
        ].tolist()
        return [row[: row.index(self._stop) + 1] if self._stop in row else row for row in out]


def _ids(tokens: Tokens) -> list[int]:
    return tokens.payload.ids.tolist() if isinstance(tokens.payload, TokenPayload) else []


class _Awake(TextTask):
    """A lake whose latency is waited for by whoever steps the whole batch."""

    def __init__(self, lake: Lake) -> None:
        self._lake = lake

    def seed_chance(self, seed: int) -> None:
        self._lake.seed_chance(seed)

    def reset(self, seed: int) -> str:
        return self._lake.reset(seed)

    def step(self, action: str) -> StepResult:
        return self._lake.move(action)

    def close(self) -> None:
        self._lake.close()


def train(job: Job, setting: dict[str, Any], outcome: Outcome) -> None:
    """One trainer from the initial weights under one setting."""
    trl: Any = importlib.import_module("trl")
    datasets: Any = importlib.import_module("datasets")
    torch.set_num_threads(setting["threads"])
    watch, letters = Watch(job), job.task == "letters"
    prompts = [Letters().reset(seed) if letters else str(seed) for seed in job.seeds]
    trainer = trl.GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32, attn_implementation="sdpa"),
        reward_funcs=_letters_reward if letters else _episode_reward,
        args=_arguments(trl, job, setting),
        train_dataset=datasets.Dataset.from_dict({"prompt": prompts, "seed": job.seeds}),
        processing_class=tokenizer_of(job.alphabet),
        rollout_func=None if letters else Episodes(job),
        callbacks=[watch],
    )
    generate = trainer._generate

    def timed(prompts: list[Any]) -> Any:
        answer = generate(prompts)
        watch.generated_s = time.monotonic()
        sampled = answer[2] if answer[2] is not None else [[1] * len(ids) for ids in answer[1]]
        outcome.tokens.append(sum(map(sum, sampled)) / len(sampled))
        return answer

    trainer._generate = timed
    trainer.train()
    outcome.steps.append(watch.steps)
    outcome.rewards.append(watch.rewards)
    outcome.began.append(watch.began_s)


def _arguments(trl: Any, job: Job, setting: dict[str, Any]) -> Any:
    """As our side trains: AdamW, one optimiser step a batch, no reference model; nothing saved, nothing recomputed."""
    return trl.GRPOConfig(
        output_dir=str(Path(job.outcome).with_suffix(".trl")), use_cpu=True, bf16=False, seed=job.seed,
        per_device_train_batch_size=BATCH, gradient_accumulation_steps=1, num_generations=GROUP, num_iterations=1,
        max_completion_length=job.turns * job.turn_tokens,
        temperature=1.0, top_p=1.0, top_k=0, beta=0.0, epsilon=0.2, loss_type="grpo", scale_rewards="group",
        learning_rate=job.lr, lr_scheduler_type="constant", adam_beta1=0.9, adam_beta2=job.beta2, weight_decay=0.0,
        max_grad_norm=1.0, optim="adamw_torch", gradient_checkpointing=False, max_steps=1_000_000,
        cache_implementation=None if setting["cache"] == "dynamic" else setting["cache"],
        logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip


def _letters_reward(completions: Sequence[str], seed: Sequence[int], **_: Any) -> list[float]:
    rewards = []
    for text, one in zip(completions, seed, strict=True):
        letters = Letters()
        letters.reset(one)
        rewards.append(letters.step(text).reward)
    return rewards


def _episode_reward(episode_reward: Sequence[float], **_: Any) -> list[float]:
    return list(episode_reward)


def serve(job: Job) -> Outcome:
    """Every setting of the job, one after another."""
    began_s = time.process_time()
    outcome = Outcome(
        versions={name: importlib.import_module(name).__version__ for name in ("trl", "torch", "transformers")}
    )
    for setting in job.settings:
        train(job, setting, outcome)
    outcome.cpu_s = time.process_time() - began_s
    return outcome


def main() -> int:
    for line in sys.stdin:
        job = Job(**json.loads(Path(line.strip()).read_text(encoding="utf-8")))
        Path(job.outcome).write_text(json.dumps(dataclasses.asdict(serve(job))), encoding="utf-8")
        sys.stdout.write(f"{DONE}\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
