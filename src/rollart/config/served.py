"""What an engine of given degrees is and holds, by its own facts: asked where degrees are chosen and where it is simulated.

Invariant: one rule says whether a model has room, so that degrees which were chosen are never refused afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator

from rollart.config.virtual import ModelledEngine
from rollart.core.errors import ConfigError
from rollart.core.resources import Degrees
from rollart.perf.calibrated import engine_cost
from rollart.perf.devices import Device
from rollart.perf.engines import engine_facts
from rollart.perf.serving import Server
from rollart.perf.shapes import ModelShape

BLOCK_TOKENS = 16
"""Tokens of a block of cache, as vLLM and SGLang divide it by default; a sequence's last block is half empty on average."""
LEAST_KV_TOKENS = 32768
"""Cache below which an engine holds hardly one long trajectory."""


def server_of(engine: ModelledEngine, device: Device, shape: ModelShape, degrees: Degrees) -> Server:
    """The engine as the cost models have it. Raises ConfigError for degrees that cannot be."""
    cost = engine_cost(
        device, shape, degrees, precision=engine.dtype, engine=engine.name, version=engine.version,
        step_tokens=float(engine.step_tokens),
    )  # fmt: skip
    return Server(
        cost=cost, facts=engine_facts(engine.name, engine.version), max_sequences=float(engine.max_live),
        max_step_tokens=float(engine.step_tokens),
    )  # fmt: skip


def kv_tokens(server: Server, max_context: int) -> int:
    """Whole blocks of cache, less what live sequences leave empty of their last ones; 0: not even the weights fit."""
    try:
        capacity = server.cost.kv_capacity_tokens()
    except ConfigError:
        return 0
    if server.facts.frees_windows:  # layers that see a window hold less than a token's cache for each token
        capacity *= max_context / max(1.0, server.cost.sequence_tokens(max_context))
    live = min(server.sequences, capacity / max_context)
    return max(0, int(capacity - live * BLOCK_TOKENS / 2) // BLOCK_TOKENS * BLOCK_TOKENS)


def smallest_tp(
    engine: ModelledEngine, device: Device, shape: ModelShape, degrees: Degrees, *, max_context: int, most: int
) -> int | None:
    """The fewest tensor-parallel ranks, a power of two of at most `most`, with room for the longest trajectory and some more.

    Other degrees as given. None: there is no such number.
    """
    least = max(LEAST_KV_TOKENS, max_context)
    for tp in _powers(most):
        spread = degrees._replace(tp=tp, dp=max(1, degrees.ep // tp))
        if shape.heads % tp == 0 and _holds(engine, device, shape, spread, max_context) >= least:
            return tp
    return None


def _holds(engine: ModelledEngine, device: Device, shape: ModelShape, degrees: Degrees, max_context: int) -> int:
    """Tokens of cache; 0 for degrees that cannot be."""
    try:
        server = server_of(engine, device, shape, degrees)
    except ConfigError:
        return 0
    return kv_tokens(server, max_context)


def _powers(most: int) -> Iterator[int]:
    n = 1
    while n <= most:
        yield n
        n *= 2
