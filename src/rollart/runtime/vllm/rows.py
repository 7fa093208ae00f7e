"""The turns in an engine whose steps happen elsewhere: what came of each, under which version, at which cost.

Invariants: a token is in `ids`, with its log-probability and in a span at once, so an answer is whole at every moment; spans
never fall and hold no empty one; a position is counted as computed anew only where new weights threw its cache away.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollart.config.engines import VLLM_MIN_TEMPERATURE
from rollart.core.errors import failure
from rollart.core.seeds import seed_of
from rollart.core.types import (
    Failure,
    Finish,
    Generation,
    Live,
    Span,
    Tokens,
    TurnRequest,
    Version,
)
from rollart.runtime.engine import admission
from rollart.runtime.payload import TokenPayload, ids_of

NO_LOGPROB = -9998.0
"""vLLM writes -9999 for what is not a number."""


@dataclass(slots=True)
class Computed:
    """How far an attempt's sequence has been through the model, and under which weights."""

    tokens: int = 0
    version: Version = -1


@dataclass(slots=True)
class Row:
    """One request. Its context and what was sampled are sent again after every interruption."""

    request: TurnRequest
    computed: Computed
    context: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    prefilled: int = 0
    rebuilt: int = 0
    sends: int = 0
    unasked_aborts: int = 0
    """Parts that vLLM ended though nobody had told it to."""
    live: bool = False
    """Sent, and not ended yet."""
    aborting: bool = False

    @classmethod
    def of(cls, request: TurnRequest, computed: Computed) -> Row:
        return cls(request=request, computed=computed, context=ids_of(request.context).tolist())

    def sent(self) -> dict[str, Any]:
        """The body that asks for what is still wanted, under an id of its own."""
        self.sends += 1
        sampling = self.request.sampling
        return {
            "request_id": self.wire_id,
            "token_ids": self.context + self.ids,
            "stream": True,
            "stream_options": {"include_usage": True},
            "priority": -self.request.priority,
            "sampling_params": {
                "temperature": sampling.temperature,
                "max_tokens": self.request.max_tokens - len(self.ids),
                "stop_token_ids": list(sampling.stop_ids),
                "ignore_eos": True,
                "logprobs": 0,
                "detokenize": False,
                # a generator begins anew with every send; so that it does not draw the same again, it is named by the place
                "seed": seed_of(sampling.seed, "vllm", len(self.context) + len(self.ids)),
            },
        }

    @property
    def wire_id(self) -> str:
        request = self.request.id
        return f"{request.traj}/{request.attempt}/{request.turn}/{request.part}/{self.sends}"

    def take(self, version: Version, ids: Sequence[int], logprobs: Sequence[float]) -> Failure | None:
        """Append what was sampled under `version`."""
        if len(ids) != len(logprobs):
            why = f"vLLM sent {len(ids)} tokens with {len(logprobs)} log-probabilities; each token needs its own"
            return failure("engine", "raised", why)
        # a NaN compares as false with everything
        if not all(one >= NO_LOGPROB for one in logprobs):
            why = f"logits of version {version} are not finite; look at its weights"
            return failure("engine", "raised", why)
        if ids:
            self.ids += ids
            self.logprobs += logprobs
            before = self.spans.pop().n_tokens if self.spans and self.spans[-1].version == version else 0
            self.spans.append(Span(version=version, n_tokens=before + len(ids)))
        return None

    def account(self, version: Version, usage: dict[str, Any]) -> None:
        """Count what the part that has just ended computed of what it was sent."""
        sent = int(usage["prompt_tokens"])
        cached = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
        sampled = int(usage.get("completion_tokens") or 0)
        if not sampled:
            return  # it was ended before its first step
        old = self.computed.tokens if self.computed.version < version else 0
        again = max(0, min(sent, old) - cached)
        self.rebuilt += again
        self.prefilled += max(0, min(sent, len(self.context)) - cached - again)
        # the last token that was sampled has not been through the model
        self.computed.tokens, self.computed.version = sent + max(0, sampled - 1), version

    @property
    def progress(self) -> Live:
        return Live(n_tokens=len(self.ids), oldest_version=self.spans[0].version if self.spans else None)

    def answer(self, finish: Finish, why: Failure | None = None) -> Generation:
        payload = TokenPayload(ids=np.array(self.ids, np.int32), logprobs=np.array(self.logprobs, np.float32))
        return Generation(
            tokens=Tokens(n_tokens=len(self.ids), spans=tuple(self.spans), payload=payload),
            finish=finish,
            prefilled_tokens=self.prefilled,
            rebuilt_tokens=self.rebuilt,
            failure=why,
        )


def refusal(request: TurnRequest, ids: NDArray[np.int32], *, vocab: int, longest: int) -> Failure | None:
    """Why this engine can never serve the request, or None. An id outside the vocabulary would end the server."""
    sampling = request.sampling
    if sampling.truncates:
        why = (
            f"top_p={sampling.top_p}, top_k={sampling.top_k}, min_p={sampling.min_p}: vLLM does not return the kept mass, "
            "without which truncated sampling cannot be corrected for; use top_p=1, top_k=0 and min_p=0"
        )
        return failure("engine", "refused", why, retryable=False)
    if 0 < sampling.temperature < VLLM_MIN_TEMPERATURE:
        why = (
            f"temperature={sampling.temperature:g}: vLLM would raise it to {VLLM_MIN_TEMPERATURE:g}; use that or more, or 0 "
            "for greedy"
        )
        return failure("engine", "refused", why, retryable=False)
    return admission.refusal(request, ids, vocab=vocab, row_tokens=longest)


def refused_version(request: TurnRequest, version: Version) -> Failure | None:
    """Why a request can no longer be served, or None."""
    if request.pin is not None and request.pin < version:
        return failure("engine", "refused", f"pinned to version {request.pin}, but version {version} is served already")
    return None


def wants(request: TurnRequest, version: Version) -> bool:
    """Whether `version` may sample this request."""
    return version >= max(request.min_version, request.pin or 0, 0)
