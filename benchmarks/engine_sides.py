"""What `benchmarks/engine.py` runs: one workload of concurrent multi-turn trajectories, and the sides that sample it.

Invariant: a side samples exactly the workload's tokens at temperature 1 from the same weights, every turn after the context
that its own tokens made; only these tokens are counted. A side is a function of the workload that returns seconds, so another
peer (an engine in an environment of its own) plugs in with one function.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import DynamicCache, StaticCache

from engine_bare_loop import BareLoop
from rollart.core.types import RequestId, Sampling, Segment, Tokens, TrajId, TurnRequest
from rollart.runtime.engine.core import EngineCore
from rollart.runtime.payload import TokenPayload, ids_of

Ids = NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """`rows` trajectories; siblings lie next to each other and have the same prompt."""

    prompts: tuple[Ids, ...]
    new: NDArray[np.int64]
    """(rows, turns) tokens to sample."""
    observations: tuple[tuple[Ids, ...], ...]
    """[row][turn] what the environment adds before that turn; empty before the first."""
    group: int

    @property
    def rows(self) -> int:
        return len(self.prompts)

    @property
    def n_tokens(self) -> int:
        return int(self.new.sum())

    @property
    def longest(self) -> int:
        """Tokens of the longest trajectory."""
        seen = [len(p) + sum(map(len, o)) for p, o in zip(self.prompts, self.observations, strict=True)]
        return int((np.array(seen) + self.new.sum(1)).max())

    @property
    def lockstep(self) -> bool:
        """Whether all rows have the same lengths, so that a batch without a scheduler wastes nothing."""
        lengths = {(len(p), *map(len, o)) for p, o in zip(self.prompts, self.observations, strict=True)}
        return len(lengths) == 1 and bool((self.new == self.new[0]).all())


Side = Callable[[Workload], float]
"""Samples the workload once; the seconds it took."""


def workload(
    *, vocab: int, rows: int, group: int, prompt: int, turns: int, observation: int, new: int, ragged: bool
) -> Workload:
    """Lengths are as given, or drawn from half to one and a half of that when `ragged`."""
    draws = np.random.default_rng(0)

    def length(mean: int) -> int:
        return int(draws.integers(mean // 2, mean + mean // 2 + 1)) if ragged else mean

    def ids(n: int) -> Ids:
        return draws.integers(0, vocab, n).astype(np.int32)

    prompts = [ids(length(prompt)) for _ in range(rows // group)]
    return Workload(
        prompts=tuple(prompts[row // group] for row in range(rows)),
        new=np.array([[length(new) for _ in range(turns)] for _ in range(rows)]),
        observations=tuple(
            tuple(ids(length(observation) if turn else 0) for turn in range(turns)) for _ in range(rows)
        ),
        group=group,
    )


class Ours:
    """The engine's core, driven as an actor drives it: what a step ends is answered with the next turn at once."""

    def __init__(self, core: EngineCore) -> None:
        self._core, self._run = core, 0

    def __call__(self, work: Workload) -> float:
        self._run += 1
        core, turn_of = self._core, [0] * work.rows
        contexts = [Segment(pieces=(_piece(prompt),)) for prompt in work.prompts]
        started = time.perf_counter()
        core.submit([request(work, self._run, row, 0, contexts[row]) for row in range(work.rows)])
        while core.has_work:
            following = []
            for id_, answer in core.step():
                row = int(id_.traj.rpartition("/")[2])
                turn_of[row] += 1
                turn = turn_of[row]
                if turn == work.new.shape[1]:
                    core.forget(id_.traj, 0)
                    continue
                context = contexts[row].extended(answer.tokens).extended(_piece(work.observations[row][turn]))
                contexts[row] = Segment(pieces=(_piece(ids_of(context)),))
                following.append(request(work, self._run, row, turn, contexts[row]))
            core.submit(following)
        seconds = time.perf_counter() - started
        assert turn_of == [work.new.shape[1]] * work.rows
        return seconds


def request(work: Workload, run: int, row: int, turn: int, context: Segment) -> TurnRequest:
    """A row's turn; `run` keeps one run's trajectories apart from another's."""
    traj = TrajId(f"run{run}/{row // work.group}/{row}")
    return TurnRequest(
        id=RequestId(traj, 0, turn, 0), model="policy", purpose="train", domain="bench", context=context,
        max_tokens=int(work.new[row, turn]), sampling=Sampling(seed=row),
    )  # fmt: skip


def first_turns(work: Workload, run: int) -> list[TurnRequest]:
    return [request(work, run, row, 0, Segment(pieces=(_piece(ids),))) for row, ids in enumerate(work.prompts)]


def bare(config: Any, weights: Mapping[str, Tensor]) -> Side:
    """The bare loop; lockstep workloads only."""

    def run(work: Workload) -> float:
        loop = BareLoop(config, weights, work.rows, work.longest)
        prompts = torch.from_numpy(np.stack(work.prompts)).long()
        observations = [torch.from_numpy(np.stack(seen)).long() for seen in zip(*work.observations, strict=True)]
        started = time.perf_counter()
        position, chunk, tokens = 0, prompts, prompts[:, :0]
        for turn, new in enumerate(work.new[0].tolist()):
            if turn:
                chunk = torch.cat([tokens[:, -1:], observations[turn]], 1)
            tokens, _ = loop.generate(chunk, new, position)
            position += chunk.shape[1] + new - 1
        return time.perf_counter() - started

    return run


def generate(model: Any, cache_kind: str, *, reuse: bool) -> Side:
    """transformers' `generate`, a batch a turn. `reuse`: one cache through all turns (lockstep workloads only); otherwise
    contexts are padded on the left and computed again each turn. No log-probabilities are asked for. Ids and mask go to the
    model's device: where they are is where transformers samples, and logits would follow them to the host at each step."""

    def run(work: Workload) -> float:
        contexts = [torch.from_numpy(prompt).long() for prompt in work.prompts]
        started = time.perf_counter()
        kept: Any = None
        if reuse:
            kept = DynamicCache() if cache_kind == "dynamic" else StaticCache(model.config, max_cache_len=work.longest)
        for turn in range(work.new.shape[1]):
            contexts = [
                torch.cat([context, torch.from_numpy(seen[turn]).long()])
                for context, seen in zip(contexts, work.observations, strict=True)
            ]
            longest = max(map(len, contexts))
            batch = torch.stack([torch.nn.functional.pad(c, (longest - len(c), 0)) for c in contexts])
            mask = torch.stack([torch.nn.functional.pad(torch.ones_like(c), (longest - len(c), 0)) for c in contexts])
            batch, mask = batch.to(model.device), mask.to(model.device)
            how = {"past_key_values": kept} if reuse else {"cache_implementation": cache_kind}
            most = int(work.new[:, turn].max())
            out = model.generate(
                batch, attention_mask=mask, max_new_tokens=most, min_new_tokens=most, do_sample=True, top_k=0, top_p=1.0,
                temperature=1.0, pad_token_id=0, **how,
            ).cpu()  # fmt: skip
            contexts = [
                torch.cat([context, out[row, longest : longest + int(work.new[row, turn])]])
                for row, context in enumerate(contexts)
            ]
        return time.perf_counter() - started

    return run


def _piece(ids: Ids) -> Tokens:
    return Tokens(n_tokens=len(ids), payload=TokenPayload(ids=ids))
