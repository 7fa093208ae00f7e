"""The text of a prediction: what a user asked, step time and its interval, where time and memory go, what it rests on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rollart.cli.tables import amount, duration, table
from rollart.optrace.prediction import Prediction
from rollart.perf.devices import GIB
from rollart.perf.train_plan import TrainingPlan

WIDTH = 18
MANY_CLASSES = 8
"""More rank classes than this are shown by the first and last few; --json has all."""


def described(found: Prediction) -> str:
    """All blocks, the step first."""
    blocks = ["\n".join(_head(found)), _memory(found), _times(found), "\n".join(_basis(found))]
    return "\n\n".join(block for block in blocks if block)


def _line(label: str, text: str) -> str:
    return f"  {label.ljust(WIDTH)}{text}"


def plan_words(plan: TrainingPlan) -> str:
    """Degrees above 1 and what else makes the plan what it is."""
    degrees = [
        f"{name} {getattr(plan, name)}" for name in ("tp", "pp", "cp", "dp", "ep", "chunks") if getattr(plan, name) > 1
    ]
    more = [" x ".join(degrees) or "one device"]
    if plan.pp > 1:
        more.append(plan.schedule.replace("_", "-"))
    if plan.sequence_parallel:
        more.append("sequence parallel")
    if plan.shards:
        more.append(f"ZeRO {plan.shards}")
    if plan.recompute != "none":
        part = f" of {plan.recompute_share:.0%} of the layers" if plan.recompute_share < 1 else ""
        more.append(f"{plan.recompute} recomputation{part}")
    more.append(plan.dtype)
    return ", ".join(more)


def _head(found: Prediction) -> Iterator[str]:
    plan = found.plan
    yield f"{found.model} on {plan.devices:,} {found.device} under {found.framework}: estimated"
    yield _line("plan", plan_words(plan))
    yield _line(
        "batch",
        f"{plan.global_batch:,} sequences of {plan.sequence:,} tokens; {plan.micro_batches} micro-batches of "
        f"{plan.micro_batch} on each data-parallel rank",
    )
    yield _line(
        "step time", f"{duration(found.step_s)} ({duration(found.low_s)} to {duration(found.high_s)} in 19 of 20)"
    )
    hardware = "" if plan.recompute == "none" else f"; {found.hfu:.1%} with what is computed again"
    yield _line("MFU", f"{found.mfu:.1%} of {amount(found.peak_flops / 1e12)} TFLOP/s{hardware}")
    yield _line(
        "throughput", f"{amount(found.tokens_per_s)} tokens/s, {amount(found.tokens_per_s / plan.devices)} a device"
    )
    yield _line("bubble", f"{found.bubble_share:.1%} of a step, mean over ranks")
    yield _line("exposed comm", _axes(found.exposed_s, found.step_s))
    yield _line("host, jitter", f"{duration(found.host_s)} and {duration(found.jitter_s)} of a step")
    needs, has = found.peak_memory_bytes / GIB, found.device_memory_bytes / GIB
    verdict = "" if found.fits else " DOES NOT FIT"
    yield _line("memory", f"{needs:.1f} GiB of {has:.1f} GiB on the fullest rank{verdict}")


def _axes(seconds: Mapping[str, float], step_s: float) -> str:
    said = [f"{axis} {duration(value)} ({value / step_s:.1%})" for axis, value in seconds.items() if value > 0]
    return ", ".join(said) or "none"


def _shown(found: Prediction) -> list[int]:
    count = len(found.classes)
    if count <= MANY_CLASSES:
        return list(range(count))
    half = MANY_CLASSES // 2
    return [*range(half), *range(count - half, count)]


def _memory(found: Prediction) -> str:
    rows = []
    for at in _shown(found):
        one, memory = found.classes[at], found.classes[at].memory
        parts = (memory.weights, memory.gradients, memory.optimizer, memory.activations, memory.buffers, memory.total)
        rows.append([one.name, f"{one.ranks:,}", *(f"{part / GIB:.2f}" for part in parts)])
    head = ["memory, GiB", "ranks", "weights", "gradients", "optimizer", "activations", "buffers", "total"]
    return table(rows, head=head, right=range(1, len(head)))


def _times(found: Prediction) -> str:
    axes = list(dict.fromkeys(axis for one in found.classes for axis, value in one.comm_s.items() if value > 0))
    rows = []
    for at in _shown(found):
        one = found.classes[at]
        moved = [f"{duration(one.exposed_s.get(axis, 0.0))} of {duration(one.comm_s.get(axis, 0.0))}" for axis in axes]
        rows.append([one.name, f"{one.ranks:,}", duration(one.busy_s), *moved, duration(one.bubble_s)])
    head = ["time of a step", "ranks", "computes", *(f"{axis} exposed" for axis in axes), "waits"]
    left = len(found.classes) - len(rows)
    more = f"\n({left} more rank classes between them: --json FILE has all)" if left else ""
    return table(rows, head=head, right=range(1, len(head))) + more


def _overlap(found: Prediction) -> str:
    """The level that was asked for, and which one the computation beside communication really has."""
    levels = {"none": "level 0", "physical": "level 1 (SMs held)"}
    shares: dict[str, float] = {}
    for basis, share in found.overlap_basis.items():
        level = levels.get(basis, "level 2 (measured kernels)")
        shares[level] = shares.get(level, 0.0) + share
    if not shares:
        return f"level {found.overlap_level} asked; no computation runs beside communication"
    said = ", ".join(f"{level} for {share:.0%}" for level, share in sorted(shares.items()))
    return f"level {found.overlap_level} asked; applied: {said} of the computation beside communication"


def _basis(found: Prediction) -> Iterator[str]:
    shares = ", ".join(f"{share:.0%} {name}" for name, share in found.provenance.items() if share > 0)
    yield f"durations rest on: {shares} (shares of the busiest class's work)"
    for source, share in sorted(found.sources.items(), key=lambda item: (-item[1], item[0])):
        yield f"  {share:6.1%}  {source}"
    kin = {"measured": "fitted to published steps of this pair", "analytic": "no step of this pair is known: its kin's"}
    yield f"  constant {found.scale:.3f} of {found.framework} on {found.device}: {kin[found.scale_basis]}"
    yield f"  overlap slowdown: {_overlap(found)}"
    for label, lines in (("assumed", found.assumptions), ("to know", found.notes)):
        for line in lines:
            yield f"{label}: {line}"
