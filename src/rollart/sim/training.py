"""How long a simulated trainer takes for a batch: the plan that it trains with, and a step's seconds from real lengths.

Owns the choice of degrees and the rule for sequences of unlike lengths. Invariants: a plan that is chosen fits the devices'
memory with the longest trajectory; a longer sequence or one more never shortens the passes over them.

The rule. `perf.training.step_time` knows one length for all sequences. From two evaluations at a length L, with n and 2n
micro-batches a rank, come the seconds c(L) that one more sequence costs a rank, and what a step costs beside them, F (bubbles,
reduction of gradients, optimiser, host). c has a part linear in L and one quadratic in it (attention); it is asked of the law
on a grid of lengths and taken in between by a line. A step over sequences of lengths l is then F at their mean length plus
max(sum of c(l) / ranks, the largest c(l)): frameworks balance sequences over data-parallel ranks, the longest one is whole.
Lengths that fill a device's tiles exactly (powers of two) are up to 6 % faster by the law; lengths as they come are not.

A table of step times (`perf.step_table`), where the configuration names one, takes the law's place: its plan is trained with,
its seconds of one more micro-batch and beside them are c and F, and what it does not speak of is refused before the first step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rollart.config.placement import device_of, layout
from rollart.config.schema import RunConfig
from rollart.config.virtual import TrainPlan
from rollart.core.errors import ConfigError
from rollart.core.types import Sample
from rollart.perf.devices import GIB, Device
from rollart.perf.links import Fabric, fabric
from rollart.perf.memory import peak_memory_bytes
from rollart.perf.shapes import ModelShape
from rollart.perf.step_table import StepTable, read_step_table
from rollart.perf.train_calibration import Calibration, calibration
from rollart.perf.train_plan import TrainingPlan, framework
from rollart.perf.training import StepTime, step_time

DEGREES = (1, 2, 4, 8, 16, 32, 64)
"""Sizes that are tried where none is given."""
MICRO_BATCHES = 4
"""Per rank and pipeline stage in the smaller of the two evaluations: enough that a bubble is a bubble."""
GRID = 1.3
"""Ratio of neighbouring lengths at which the law is asked; between them a line is off by about 1 %."""
LEAST_LENGTH = 64
FORWARD = 1.0 / 3.0
"""Of a micro-batch's seconds: one of the three passes over the weights (forward, backward for inputs and for weights)."""
SAME_MODEL = 0.02
"""Counts of parameters that differ by less are of one model: norms and biases are counted by some and not by others."""
BY_TABLE = ("tp", "pp", "cp", "ep", "micro_batch", "recompute", "framework")
"""What a table of step times decides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainLaw:
    """`perf.training.step_time` for one model on one pool, with the package's constants."""

    shape: ModelShape
    device: Device
    fabric: Fabric
    framework: str
    constants: Calibration

    def step(self, plan: TrainingPlan) -> StepTime:
        scale, _ = self.constants.scale(self.framework, self.fabric.chip)
        return step_time(
            self.shape, plan, self.device, self.fabric, framework(self.framework), self.constants.law, scale
        )

    def memory_bytes(self, plan: TrainingPlan) -> float:
        return peak_memory_bytes(self.shape, plan, framework(self.framework))


@dataclass(slots=True, kw_only=True)
class TrainerHardware:
    """A trainer with its plan. `samples_s` and `logprobs_s` are what a simulated trainer spends."""

    law: TrainLaw
    plan: TrainingPlan
    logprob_pass: bool
    table: StepTable | None = None
    """In the law's place."""
    _costs: dict[int, float] = field(default_factory=dict)
    _fixed: dict[int, float] = field(default_factory=dict)

    @property
    def weight_bytes(self) -> int:
        """Of a published version: 16 bits a parameter, whatever an engine makes of them."""
        return 2 * self.law.shape.parameters

    def usual_s(self) -> float:
        """A step of the plan as it stands, all sequences of its length."""
        if self.table is not None:
            return self.table.seconds(self.plan.sequence, self.plan.micro_batches)
        return self.law.step(self.plan).total_s

    def samples_s(self, samples: Sequence[Sample]) -> float:
        """One optimiser step over these samples."""
        return self.step_s([sample.segment.n_tokens for sample in samples])

    def logprobs_s(self, samples: Sequence[Sample]) -> float:
        """One forward pass over these samples."""
        return FORWARD * self._passes_s([sample.segment.n_tokens for sample in samples])

    def step_s(self, lengths: Sequence[int]) -> float:
        if not lengths:
            return 0.0
        mean = sum(lengths) / len(lengths)
        passes = self._passes_s(lengths)
        return self._beside_s(mean) + passes * (1.0 + (FORWARD if self.logprob_pass else 0.0))

    def _passes_s(self, lengths: Iterable[int]) -> float:
        each = [self._sequence_s(length) for length in lengths]
        return max(math.fsum(each) / self.plan.dp, *each) if each else 0.0

    def _sequence_s(self, length: int) -> float:
        """Seconds that a rank spends on one sequence of `length` tokens."""
        if self.table is not None:
            return self.table.micro_batch_s(length) / self.plan.micro_batch
        place = math.log(max(length, LEAST_LENGTH) / LEAST_LENGTH) / math.log(GRID)
        low = int(place)
        below, above = LEAST_LENGTH * GRID**low, LEAST_LENGTH * GRID ** (low + 1)
        share = (max(length, LEAST_LENGTH) - below) / (above - below)
        return (1.0 - share) * self._at(low) + share * self._at(low + 1)

    def _at(self, place: int) -> float:
        found = self._costs.get(place)
        if found is None:
            found = self._costs[place] = self._two(LEAST_LENGTH * GRID**place)[0]
        return found

    def _beside_s(self, mean: float) -> float:
        if self.table is not None:
            return self.table.beside_s(mean)
        place = round(math.log(max(mean, LEAST_LENGTH) / LEAST_LENGTH) / math.log(GRID))
        found = self._fixed.get(place)
        if found is None:
            found = self._fixed[place] = self._two(LEAST_LENGTH * GRID**place)[1]
        return found

    def _two(self, length: float) -> tuple[float, float]:
        """(seconds of one more sequence on a rank, seconds beside them) at one length."""
        plan, few = self.plan, MICRO_BATCHES * self.plan.pp
        per_rank = self.plan.micro_batch * few
        one = replace(plan, sequence=max(1, round(length)), global_batch=plan.dp * per_rank)
        less, more = self.law.step(one).total_s, self.law.step(replace(one, global_batch=2 * one.global_batch)).total_s
        each = (more - less) / per_rank
        return each, max(0.0, less - per_rank * each)


def trainer_hardware(config: RunConfig, shape: ModelShape, *, longest: int, usual: float) -> TrainerHardware:
    """The trainer on all pools with role train, with the fastest plan that fits trajectories of `longest` tokens.

    `usual`: tokens of a usual trajectory, at which plans are compared. Raises ConfigError when none fits.
    """
    pools = {name: pool for name, pool in layout(config).items() if "train" in pool.roles}
    home = next(iter(pools.values()))
    device = device_of(config.cluster, home.device)
    links = fabric(home.device)
    if home.device in config.cluster.devices:
        links = replace(links, intra_bytes_per_s=device.link_bytes_per_s)
    law = TrainLaw(
        shape=shape, device=device, fabric=links, framework=config.trainer.plan.framework,
        constants=calibration()[0],
    )  # fmt: skip
    devices = sum(pool.devices for pool in pools.values())
    if config.trainer.plan.table:
        return _by_table(config, law, devices=devices, longest=longest, usual=usual)
    if config.trainer.plan.ep > 1 and not shape.experts:
        raise ConfigError(
            f"trainer.plan.ep={config.trainer.plan.ep} but {shape.name} has no experts; use trainer.plan.ep=1"
        )
    plans = _plans(config, shape, devices=devices, in_node=home.devices_per_node, longest=longest)
    if not plans:
        raise ConfigError(_no_degrees(config, devices))
    fits = [plan for plan in plans if law.memory_bytes(plan) <= device.memory_bytes]
    if not fits:
        raise ConfigError(_too_large(config, law, plans, devices, longest))
    compared = [replace(plan, sequence=max(1, min(longest, round(usual)))) for plan in fits]
    best = min(compared, key=lambda plan: law.step(plan).total_s)
    return TrainerHardware(law=law, plan=best, logprob_pass=config.trainer.plan.logprob_pass)


def _by_table(config: RunConfig, law: TrainLaw, *, devices: int, longest: int, usual: float) -> TrainerHardware:
    """The trainer whose seconds a file gives. Raises ConfigError where the file is of another job than the configuration."""
    asked = config.trainer.plan
    table = read_step_table(Path(asked.table).expanduser())
    key, plan, shape = f"trainer.plan.table={asked.table}", table.plan, law.shape
    problems = []
    if abs(table.parameters / shape.parameters - 1.0) > SAME_MODEL:
        problems.append(
            f"is of {table.model} with {table.parameters:.4g} parameters; the model is {shape.name} with {shape.parameters:.4g}"
        )
    if table.device != law.device.name:
        problems.append(f"is of {table.device}; the train pools have {law.device.name}")
    if plan.devices != devices:
        problems.append(f"is of {plan.devices} devices; the train pools have {devices}; use {plan.devices}")
    for name in BY_TABLE:
        given, has = getattr(asked, name), table.framework if name == "framework" else getattr(plan, name)
        if given not in (has, TrainPlan.model_fields[name].default):
            problems.append(f"has {name} {has}; trainer.plan.{name}={given}; use {has}, or another table")
    if longest > table.longest:
        problems.append(
            f"ends at {table.longest} tokens; trajectories have up to model.max_context={longest}; use "
            f"model.max_context={table.longest}, or write the table with --seq {longest}"
        )
    if table.memory_bytes > law.device.memory_bytes:
        problems.append(
            f"needs {table.memory_bytes / GIB:.1f} GiB on a {law.device.name} with {law.device.memory_bytes / GIB:.1f} GiB"
        )
    if problems:
        raise ConfigError("\n".join(f"{key} {problem}" for problem in problems))
    batch = config.schedule.batch // config.schedule.steps_per_batch
    used = replace(
        plan, sequence=max(1, min(longest, round(usual))), global_batch=max(batch, plan.dp * plan.micro_batch)
    )
    return TrainerHardware(
        law=replace(law, framework=table.framework), plan=used, logprob_pass=asked.logprob_pass, table=table
    )


def _plans(config: RunConfig, shape: ModelShape, *, devices: int, in_node: int, longest: int) -> list[TrainingPlan]:
    """Plans with the degrees that are given; others are tried as far as they divide devices, heads and layers."""
    asked = config.trainer.plan
    batch = config.schedule.batch // config.schedule.steps_per_batch
    found = []
    for tp in [asked.tp] if asked.tp else [n for n in DEGREES if n <= in_node and shape.heads % n == 0]:
        for pp in [asked.pp] if asked.pp else [n for n in DEGREES if n <= shape.layers]:
            dp, left = divmod(devices, tp * pp * asked.cp)
            # an expert-parallel group lies within the ranks that replicate the rest
            if left or not dp or (dp * asked.cp * tp) % asked.ep:
                continue
            found.append(
                TrainingPlan(
                    devices=devices, micro_batch=asked.micro_batch, global_batch=max(batch, dp * asked.micro_batch),
                    sequence=longest, dp=dp, tp=tp, pp=pp, cp=asked.cp, ep=asked.ep, shards=1, recompute=asked.recompute,
                    sequence_parallel=tp > 1 and framework(asked.framework).sequence_parallel,
                )
            )  # fmt: skip
    return found


def _no_degrees(config: RunConfig, devices: int) -> str:
    asked = config.trainer.plan
    least = max(asked.tp, 1) * max(asked.pp, 1) * asked.cp
    near = least * max(1, round(devices / least))
    return (
        f"trainer.plan: tp {asked.tp} x pp {asked.pp} x cp {asked.cp} (ep {asked.ep}) do not divide the {devices} devices of "
        f"the train pools; use {near} devices, or degrees of 0 to have them chosen"
    )


def _too_large(config: RunConfig, law: TrainLaw, plans: Sequence[TrainingPlan], devices: int, longest: int) -> str:
    least = min(plans, key=law.memory_bytes)
    needs, has = law.memory_bytes(least) / GIB, law.device.memory_bytes / GIB
    full = replace(least, recompute="full")
    ways = [f"more than {devices} devices", "trainer.plan.cp above 1"]
    if law.memory_bytes(full) <= law.device.memory_bytes:
        ways.insert(0, "trainer.plan.recompute=full")
    return (
        f"trainer.plan: {law.shape.name} with trajectories of model.max_context={longest} tokens needs {needs:.1f} GiB on each "
        f"of {devices} {law.device.name} with {has:.1f} GiB (tp {least.tp}, pp {least.pp}, recompute {least.recompute}); use "
        f"{' or '.join(ways)}"
    )
