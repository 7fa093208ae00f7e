"""Data parallelism over a fast and a slow network: GPT-2 and ResNet-152 on 128 A100, as Echo's EC-6 measured them.

What: the step at 100 Gb/s a server. Against what: the measured step. How: models by their published blocks (parameters and
multiply-adds each); forward and backward in proportion to the multiply-adds, by a factor taken from the measured step at
1.6 Tb/s, because the batch is not published; gradients in buckets of 25 MiB as torch's DDP makes them, reduced beside the
backward; collectives by the package's table of the machine that the paper's logs are of, carried to the slow network as a rate,
not as a share of its cards (`perf.collective_table.felt_network`), composed by its composer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rollart.optrace.assemble import compose_step
from rollart.optrace.costs import Pricer
from rollart.optrace.ops import Op, Part, Priced, Trace
from rollart.optrace.step_timeline import StepTimeline
from rollart.optrace.transforms import derived
from rollart.perf.collective_table import Estimate, collective_estimate
from rollart.perf.collectives import Request
from rollart.perf.devices import device
from rollart.perf.links import Fabric, fabric
from rollart.perf.train_calibration import calibration
from rollart.perf.train_comm import Group
from rollart.perf.train_plan import Framework, TrainingPlan

RANKS, PER_SERVER = 128, 8
MEASURED_DEVICE = "A100-SXM4-40GB"
"""As the paper's own collective logs, which the table holds, name the device of these servers."""
FAST_GBIT, SLOW_GBIT = 1600.0, 100.0
"""Of a server's network, one direction."""
BUCKET_BYTES = 25 << 20
HALVINGS = 60
"""Of the interval in which the factor of computation lies."""
RESNET_STAGES = ((3, 64, 56), (8, 128, 28), (36, 256, 14), (3, 512, 7))
"""ResNet-152 (He et al. 2016, table 1): blocks, width and side of the image in each stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A piece of a model, in the order of its forward."""

    parameters: float
    work: float
    """Multiply-adds of one sample (of one token)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Seconds of a step: measured at both speeds, and what the paper predicted at the slow one."""

    name: str
    blocks: tuple[Block, ...]
    fast_s: float
    slow_s: float
    paper_s: float


def gpt2() -> tuple[Block, ...]:
    """GPT-2 of 124 million parameters: 12 layers of 768; the head is the embedding, whose gradient is the last to be whole."""
    hidden, layers, vocab, positions = 768, 12, 50257, 1024
    layer = 12.0 * hidden * hidden
    embedding = Block(parameters=float((vocab + positions) * hidden), work=0.0)
    return (
        embedding,
        *[Block(parameters=layer, work=layer)] * layers,
        Block(parameters=0.0, work=float(vocab * hidden)),
    )


def resnet152() -> tuple[Block, ...]:
    """ResNet-152 of 60 million parameters."""
    found, inputs = [Block(parameters=9408.0, work=9408.0 * 112 * 112)], 64
    for at, (blocks, width, side) in enumerate(RESNET_STAGES):
        for place in range(blocks):
            first, wide = place == 0, 4 * width
            before = side * 2 if first and at else side
            sizes = [(inputs * width, before), (9 * width * width, side), (width * wide, side)]
            sizes += [(inputs * wide, side)] if first else []
            found.append(
                Block(
                    parameters=float(sum(count for count, _ in sizes)),
                    work=float(sum(count * s * s for count, s in sizes)),
                )
            )
            inputs = wide
    return (*found, Block(parameters=2048.0 * 1000, work=2048.0 * 1000))


CASES = (
    Case(name="GPT2", blocks=gpt2(), fast_s=0.1674, slow_s=0.1995, paper_s=0.2063),
    Case(name="ResNet152", blocks=resnet152(), fast_s=0.3357, slow_s=0.3511, paper_s=0.3743),
)
PLAN = TrainingPlan(devices=RANKS, dp=RANKS, micro_batch=1, global_batch=RANKS, sequence=1024, dtype="fp32")
RULES = Framework(grad_bytes=4)


def trace_of(case: Case) -> Trace:
    """One rank's step: one operator forward and two backward for each block, whose bytes stand for its work."""
    least = max(block.work for block in case.blocks) * 1e-6

    def part(name: str, block: Block) -> Part:
        work = max(block.work, least)
        alike = {"kind": "pass", "moved_bytes": work, "shape": (1,), "dtype": "fp32"}
        return Part(
            name=name,
            forward=(Op(id=0, name="block.forward", **alike),),  # type: ignore[arg-type]
            backward=(
                Op(id=0, name="block.input", **alike),  # type: ignore[arg-type]
                Op(id=1, name="block.weight", weight_gradient=True, **alike),  # type: ignore[arg-type]
            ),
            parameters=block.parameters,
        )

    first, *layers, last = case.blocks
    names = [f"block {at}" for at in range(len(layers))]
    parts = {name: part(name, block) for name, block in zip(names, layers, strict=True)}
    return Trace(
        model=case.name, plan=replace(PLAN, devices=1, dp=1, global_batch=1),
        parts={"embedding": part("embedding", first), **parts, "head": part("head", last)}, layers=tuple(names),
    )  # fmt: skip


def logged(op: str, payload_bytes: float, where: Group, links: Fabric) -> Estimate:
    """Seconds of a collective by the curves of that machine."""
    asked = Request(op=op, ranks=where.ranks, payload_bytes=payload_bytes, fabric=links, nodes=where.domains)
    return collective_estimate(asked, MEASURED_DEVICE)


def step_of(case: Case, unit_s: float, gbit: float) -> StepTimeline:
    """The step when one unit of work takes `unit_s` and a server's network gives `gbit`."""
    links = fabric("A100", f"NVLink 600GB/s; {gbit / PER_SERVER:g} Gb/s a device")
    pricer = Pricer(
        device=device("A100"), fabric=links, law=calibration()[0].law, framework=RULES, plan=PLAN, collectives=logged
    )

    def price(op: Op) -> Priced:
        if op.stream == "comm":
            return pricer.price(op)
        return Priced(seconds=unit_s * op.moved_bytes, provenance="measured", log_std=0.01, source="step at 1.6 Tb/s")

    trace = derived(trace_of(case), PLAN, RULES, bucket_bytes=BUCKET_BYTES)
    return compose_step(trace, PLAN, price, framework=RULES, fabric=links)


def ddp_steps(case: Case) -> dict[str, float]:
    """The predicted slow step, after computation was made to give the measured fast one."""
    low, high = 0.0, case.fast_s / sum(block.work for block in case.blocks)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if step_of(case, middle, FAST_GBIT).step_s < case.fast_s:
            low = middle
        else:
            high = middle
    slow = step_of(case, high, SLOW_GBIT)
    (one,) = slow.classes
    return {
        "slow_s": slow.step_s,
        "wire_s": one.comm_s["dp"],
        "exposed_s": one.exposed_s["dp"],
        "compute_s": one.busy_s,
    }


def parameters(blocks: Sequence[Block]) -> float:
    """Of all blocks."""
    return sum(block.parameters for block in blocks)
