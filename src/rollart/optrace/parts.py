"""From a recording of a few layers to the parts of a trace, each kind of layer once.

Owns the cutting of a recording at the borders of layers. Invariant: two layers share a part only if they run the same
operators with the same shapes, dependencies and kept bytes; a layer that was not built is given the part of the last built one
of its kind. Why: a trace must not grow with the depth of a model, and whether layers are alike is seen, not supposed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from rollart.optrace.ops import Op, Part, Pass

if TYPE_CHECKING:
    from rollart.optrace.recorder import Recording, Seen


SHARD_COPIES = frozenset({"aten._foreach_copy_", "fsdp.all_gather_copy_in"})


def operators(seen: Iterable[Seen], axes: Mapping[str, str]) -> tuple[Op, ...]:
    """The operators of one part and pass, numbered from 0; dependencies on other parts are left to the order of parts."""
    numbers: dict[int, int] = {}
    found: list[Op] = []
    for one in seen:
        asked = one.work
        numbers[one.index] = len(found)
        found.append(
            Op(
                id=len(found), name=one.name, kind=asked.kind, stream=asked.stream,
                deps=tuple(sorted({numbers[dep] for dep in one.deps if dep in numbers})), shape=asked.shape,
                dtype=asked.dtype, flops=asked.flops, moved_bytes=asked.moved_bytes,
                written_bytes=asked.written_bytes, saved_bytes=one.saved_bytes,
                collective=asked.collective, payload_bytes=asked.payload_bytes,
                axis=axes[asked.group] if asked.group else "",  # type: ignore[arg-type]
                weight_gradient=one.during == "backward" and not one.leads_on and asked.stream == "compute",
            )
        )  # fmt: skip
    return tuple(found)


def part_of(
    recording: Recording, recorded: str, axes: Mapping[str, str], *, parameters: float, expert_parameters: float
) -> Part:
    """The part that was recorded under a name."""

    def during(wanted: Pass) -> tuple[Op, ...]:
        return operators((one for one in recording.seen if one.part == recorded and one.during == wanted), axes)

    return Part(
        name=recorded, forward=during("forward"), backward=during("backward"), optimizer=during("optimizer"),
        parameters=parameters, expert_parameters=expert_parameters,
        saved_bytes=recording.saved_bytes.get(recorded, 0.0),
        boundary_bytes=recording.boundary_bytes.get(recorded, 0.0),
    )  # fmt: skip


def thinner(part: Part, ways: float) -> Part:
    """The part when its weights are sharded over `ways` times as many ranks as were recorded: each has less of them to do."""
    if ways == 1:
        return part
    return replace(
        part, forward=_thinner(part.forward, ways, whole=False), backward=_thinner(part.backward, ways, whole=False),
        optimizer=_thinner(part.optimizer, ways, whole=True),
    )  # fmt: skip


def _thinner(ops: Sequence[Op], ways: float, *, whole: bool) -> tuple[Op, ...]:
    """`whole`: everything works on shards; else the copies before a gather, and what follows the scatter of gradients."""
    shards: set[int] = set()
    for op in ops:
        scattered = any(
            dep in shards or (ops[dep].collective == "reduce_scatter" and ops[dep].axis == "dp") for dep in op.deps
        )
        if op.stream == "compute" and (whole or op.name in SHARD_COPIES or scattered):
            shards.add(op.id)
    return tuple(
        replace(
            op, moved_bytes=op.moved_bytes / ways, written_bytes=op.written_bytes / ways,
            shape=(max(1, round(op.shape[0] / ways)), *op.shape[1:]) if op.shape else (),
        ) if op.id in shards else op
        for op in ops
    )  # fmt: skip


def shared(
    built: Sequence[Part], built_at: Sequence[int], kinds: Sequence[str]
) -> tuple[dict[str, Part], tuple[str, ...]]:
    """Distinct parts by name, and the part of each layer of the whole model.

    `built_at[i]`: which layer of the model `built[i]` is; `kinds`: the kind of each layer.
    """
    parts: dict[str, Part] = {}
    named: dict[int, str] = {}
    for part, at in zip(built, built_at, strict=True):
        kind = f"{kinds[at]} layer"
        same = next((name for name, known in parts.items() if replace(known, name=part.name) == part), None)
        if same is None:
            count = sum(1 for name in parts if name == kind or name.startswith(f"{kind} "))
            same = kind if not count else f"{kind} {count + 1}"
            parts[same] = replace(part, name=same)
        named[at] = same
    last = {kinds[at]: named[at] for at in built_at}
    return parts, tuple(named.get(index, last[kind]) for index, kind in enumerate(kinds))
