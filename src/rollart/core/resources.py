"""Devices and who holds them: engines, leases, limits, and what the cluster says of them unasked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from rollart.core.types import Failure, Role, Version


class Degrees(NamedTuple):
    """How a model is laid over devices: tensor, pipeline, data, context and expert parallel sizes."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1


DEFAULT_DEGREES = Degrees()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """One inference server of 1..n ranks. Callers never see ranks."""

    id: str
    lease: str
    pool: str
    role: Role
    degrees: Degrees = DEFAULT_DEGREES
    kv_tokens: int
    fingerprint: Literal["bitwise", "probe"]
    mismatch: float = 0.0
    """With `probe`: largest mean |difference| of log-probabilities from the trainer's that is rounding; measured."""
    version: Version = 0
    """What it serves when it joins."""
    slower: str = ""
    """Why it is slower than it need be, for who reads the record; empty: it is not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a decision may set on a live engine; the engine enforces it within one step."""

    live_requests: int
    rollout_kv_tokens: int
    slo_s: tuple[float, float] | None = None
    """Targets of the served model: first token, each next token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """A time-bounded right to devices. `until_s` is inf for owned ones; serving and spot leases expire or are revoked."""

    id: str
    role: Role
    pool: str
    devices: tuple[str, ...]
    degrees: Degrees = DEFAULT_DEGREES
    until_s: float = float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Everything that the world says unasked."""

    kind: Literal["joined", "lost", "revoked", "load", "preempted", "frozen", "applied"]
    subject: str
    role: Role
    lease: str = ""
    """The lease that the subject runs on; to be released before another takes its place."""
    failure: Failure | None = None
    facts: Mapping[str, float | int | str] = field(default_factory=dict)
