"""Seconds of a traced operator, what they rest on, and how far they may be off.

Owns `Pricer`. The stated order of what a price rests on:

1. `measured`: the profile holds this operator (same kind, dtype, shape and amount) or this collective at this size. 2.
`interpolated`: the profile holds some like it, no further than `REACH` beyond them in any respect. What is interpolated
is the log of measured over analytic seconds, so that tiles, waves and launches stay where the law puts them. A collective
that the package's table interpolates or carries from the same chip counts as this. 3. `analytic`: the roofline of
`perf.operators`, the constants of `perf.collectives`.

Invariant: every operator has a finite price above 0 and a standard deviation above 0; nothing is extrapolated further
than `REACH`; with no profile, a device that is twice as fast in all respects makes no operator slower. Why: a missing
entry that costs nothing, or is guessed from afar, is how simulators of steps go wrong without a word.

`Priced.log_std` is the error that all operators of a kind have in common, since one law or one table errs alike on all of
them: within a kind it adds, between kinds its squares do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property

from rollart.core.errors import ConfigError
from rollart.optrace.measured_ops import Table, work_of
from rollart.optrace.ops import Op, Part, Pass, Priced, Provenance
from rollart.optrace.parallel_groups import members, placed
from rollart.perf.collective_table import Estimate, collective_estimate
from rollart.perf.collectives import Request
from rollart.perf.device_profile import CollectiveTime, DeviceProfile, Work, base_name
from rollart.perf.devices import Device
from rollart.perf.links import Fabric
from rollart.perf.operators import (
    FLASH_BACKWARD_FLOPS,
    flash_attention_s,
    gemm_s,
    score_attention_s,
    stream_s,
)
from rollart.perf.train_calibration import calibration
from rollart.perf.train_comm import Group
from rollart.perf.train_layers import TrainingLaw
from rollart.perf.train_plan import Framework, TrainingPlan, flash_fraction

LEAST_LOG_STD = 0.02
"""Clocks of two devices of one kind differ by 2 %, whatever the repetitions of one of them say."""
OF_MEAN_ABS = math.sqrt(math.pi / 2)
"""Standard deviation over mean absolute error of a normal distribution."""
COLLECTIVE_LOG_STD = 0.30
"""Of a collective by constants alone: the error that is asked of them on a whole (device, interconnect) held back."""
BASES: Mapping[str, Provenance] = {
    "measured": "measured", "interpolated": "interpolated", "carried": "interpolated", "analytic": "analytic",
}  # fmt: skip
"""Of `perf.collective_table`, in the words of a trace."""
LAYER_OPERATORS: Mapping[Pass, int] = {"forward": 38, "backward": 80}
"""Of a Llama layer as captured in plain PyTorch: what a host launches in the law's seconds of a layer."""

EAGER_PASSES: Mapping[str, float] = {"native_layer_norm_backward": 2.35, "sum": 1.38}
"""How many times as long a pass of PyTorch's own kernels takes as an elementwise one of as many bytes.

From the times alone in `overlap_slowdown.csv` (GPT-2 of 8,192 tokens, A100; the rows at full clock): elementwise kernels of
8,192 x 3,072 take 220 us for three operands; a layer norm's backward is a kernel for the input (58 us) and another, which reads
both operands again, for its weights (72 us), where 55 us would do for three operands; the gradients of a layer's biases, sums
over rows, take 228 us where 165 would do.
"""

Estimator = Callable[[str, float, Group, Fabric], Estimate]
"""(operation, bytes of a rank's whole buffer, group, fabric) -> seconds with their basis."""


def table_estimate(op: str, payload_bytes: float, where: Group, fabric: Fabric) -> Estimate:
    """By the model of collectives frozen in the package."""
    asked = Request(op=op, ranks=where.ranks, payload_bytes=payload_bytes, fabric=fabric, nodes=where.domains)
    return collective_estimate(asked)


def check_profile(profile: DeviceProfile | None, chip: Device) -> None:
    """Raise ConfigError for a profile of another device than the one that a job runs on."""
    if profile is not None and profile.device.name != chip.name:
        raise ConfigError(
            f"the profile is of {profile.device.name}, the job runs on {chip.name}; measure one there, name that device, or "
            "leave the profile out"
        )


@cache
def step_log_std(own_constant: bool) -> float:
    """Error of whole steps by the law whose constant other measurements of the pair gave, or none did (a stand-in).

    From the suites that the package's calibration held back one by one.
    """
    suites = calibration()[1]["leave_one_suite_out"].values()
    wanted = {"its own"} if own_constant else {"stand-in"}
    errors = [suite["mean_abs_err"] for suite in suites if set(suite["from"].values()) == wanted]
    return OF_MEAN_ABS * max(float(sum(errors)) / len(errors), LEAST_LOG_STD)


def analytic_s(work: Work, *, device: Device, law: TrainingLaw, framework: Framework) -> float:
    """Seconds of an operator of the compute stream by the roofline, never less than its bytes and FLOPs take."""
    operators = law.operators
    eager = 1.0 if framework.fused or work.kind != "pass" else EAGER_PASSES.get(base_name(work.name), 1.0)
    moved_s = stream_s(eager * work.moved_bytes, device=device, law=operators) + operators.kernel_s
    if work.kind == "gemm":
        rows, columns, inner, batch = work.shape
        product_s = gemm_s(rows, columns, inner, device=device, law=operators, dtype=work.dtype, batch=batch)
        return max(product_s, moved_s)
    if work.kind in ("attention", "attention_backward"):
        return max(_attention_s(work, device, law, framework), moved_s)
    computed_s = work.flops / device.peak_flops("fp32" if "fp32" in device.flops else "bf16")
    return max(moved_s, computed_s + operators.kernel_s)


def _attention_s(work: Work, device: Device, law: TrainingLaw, framework: Framework) -> float:
    queries, keys, heads, dims = work.shape
    backward = work.kind == "attention_backward"
    if framework.attention == "scores":
        return score_attention_s(
            queries, keys, heads, dims // 2, device=device, law=law.operators, backward=backward
        )  # fmt: skip
    causal_s = flash_attention_s(
        queries, keys, heads, dims, device=device, law=law.operators, backward=backward,
        fraction=flash_fraction(framework.attention, device.family, dims / 2),
    )  # fmt: skip
    causal = float(queries) * keys * heads * dims * (FLASH_BACKWARD_FLOPS if backward else 1.0)
    start_s = law.operators.kernel_s
    return start_s + (causal_s - start_s) * (work.flops / causal if work.flops > 0 else 1.0)


@dataclass(frozen=True, kw_only=True)
class Pricer:
    """Prices the operators of one plan on one device. Raises ConfigError for a profile of another device.

    `scale` (the constant of a framework on a chip) is in all seconds but those that the profile gives; `scale_known`: it
    was fitted to this pair and is no stand-in.
    """

    device: Device
    fabric: Fabric
    law: TrainingLaw
    framework: Framework
    plan: TrainingPlan
    profile: DeviceProfile | None = None
    scale: float = 1.0
    scale_known: bool = True
    by_operators: bool = False
    """The host launches operators (a module of one's own), not layers of a kind that the law knows."""
    collectives: Estimator = table_estimate
    _prices: dict[tuple[object, ...], Priced] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_profile(self.profile, self.device)
        if not 0.0 < self.scale < math.inf:
            raise ConfigError(f"scale of a pricer is {self.scale}; give a finite number above 0 (1: none)")

    def price(self, op: Op) -> Priced:
        """Seconds of `op` alone. Equal operators are priced once."""
        key = (op.stream, work_of(op), op.collective, op.payload_bytes, op.axis)
        found = self._prices.get(key)
        if found is None:
            found = self._prices[key] = self._communication(op) if op.stream == "comm" else self._computation(op)
        return found

    def hidden_share(self, op: Op) -> float:
        """Share of a collective's seconds that the framework hides by splitting its products; not in `price`."""
        if op.axis == "tp" and self.framework.overlap_tp:
            return self.law.tp_hidden
        if op.axis == "ep" and self.framework.graphs:
            return self.law.a2a_hidden
        return 0.0

    # ---- computation

    @cached_property
    def _table(self) -> Table | None:
        return Table(profile=self.profile, analytic_s=self._analytic_s) if self.profile else None

    def _analytic_s(self, work: Work) -> float:
        return analytic_s(work, device=self.device, law=self.law, framework=self.framework)

    @cached_property
    def _law_log_std(self) -> float:
        return step_log_std(self.scale_known)

    def _computation(self, op: Op) -> Priced:
        work = work_of(op)
        if self._table is not None:
            said = f"profile of {self.device.name}"
            row = self._table.exact(work)
            if row is not None:
                own = max(row.log_std, LEAST_LOG_STD)
                return Priced(seconds=row.seconds, provenance="measured", log_std=own, source=said)
            near = self._table.near(work)
            if near is not None:
                seconds, spread = near
                return Priced(
                    seconds=seconds, provenance="interpolated", source=said,
                    log_std=self._law_log_std if spread is None else max(LEAST_LOG_STD, spread),
                )  # fmt: skip
        return Priced(
            seconds=self.scale * self._analytic_s(work), provenance="analytic", log_std=self._law_log_std,
            source=f"roofline of {self.device.name}",
        )  # fmt: skip

    # ---- communication

    def _communication(self, op: Op) -> Priced:
        where = self.group_of(op)
        known = self._profiled_collective(op, where)
        if known is not None:
            return known
        waited_s = self.law.hop_s if op.axis == "pp" else 0.0
        found = self.collectives(op.collective, op.payload_bytes, where, self.fabric)
        default = COLLECTIVE_LOG_STD if found.basis == "analytic" else self._law_log_std
        return Priced(
            seconds=self.scale * (found.seconds + waited_s), provenance=BASES[found.basis],
            log_std=max(LEAST_LOG_STD, found.log_std or default), source=f"collectives of {self.fabric.chip}: {found.basis}",
        )  # fmt: skip

    def group_of(self, op: Op) -> Group:
        """The ranks that `op` communicates among, by its axis. Raises ConfigError where the plan has no such axis."""
        ranks = self.plan.pp if op.axis == "pp" else members(op, self.plan)[0]
        if ranks <= 1:
            raise ConfigError(
                f"operator {op.id} ({op.name}) communicates over {op.axis}, of which the plan has {ranks} rank; "
                f"leave it out or give the plan its degree"
            )
        return placed(op, self.plan, self.fabric)

    @cached_property
    def _curves(self) -> dict[tuple[str, int, int], list[CollectiveTime]]:
        found: dict[tuple[str, int, int], list[CollectiveTime]] = {}
        for row in self.profile.collectives if self.profile else ():
            found.setdefault((row.op, row.ranks, row.domains), []).append(row)
        return {key: sorted(rows, key=lambda row: row.payload_bytes) for key, rows in found.items()}

    def _profiled_collective(self, op: Op, where: Group) -> Priced | None:
        """From the profile's curve of the same operation and group: a point of it, or on the line between two in log-log."""
        rows = self._curves.get((op.collective, where.ranks, where.domains))
        if not rows:
            return None
        said = f"profile of {self.device.name}: {rows[0].library}"
        for row in rows:
            if row.payload_bytes == op.payload_bytes:
                spread = max(row.log_std, LEAST_LOG_STD)
                return Priced(seconds=row.seconds, provenance="measured", log_std=spread, source=said)
        below = [row for row in rows if row.payload_bytes < op.payload_bytes]
        above = [row for row in rows if row.payload_bytes > op.payload_bytes]
        if not below or not above:
            return None
        low, high = below[-1], above[0]
        span = math.log(high.payload_bytes / low.payload_bytes)
        share = math.log(op.payload_bytes / low.payload_bytes) / span
        seconds = math.exp((1 - share) * math.log(low.seconds) + share * math.log(high.seconds))
        spread = max(low.log_std, high.log_std, LEAST_LOG_STD) * math.sqrt(2.0)
        return Priced(seconds=seconds, provenance="interpolated", log_std=spread, source=said)

    # ---- the host

    @property
    def step_host_s(self) -> float:
        """Host seconds of a step outside its layers."""
        return self.scale * self.law.step_host_s

    def host_s(
        self, parts: Sequence[Part], direction: Pass, recomputed: float = 0.0, ends: Sequence[Part] = ()
    ) -> float:
        """Seconds in which the host launches the operators of one pass over `parts` (one entry per layer) and `ends`
        (embedding, head).

        By the profile's host where it has one and nothing is captured in graphs: operators times what one takes. Else by
        the law: so much a layer and pass, `recomputed` (share of the layers whose forward is run again) passes more;
        `by_operators`: its share for as many operators, `ends` included.
        """
        host = self.profile.host if self.profile else None
        if host is not None and not self.framework.graphs:
            each = {"forward": host.recorded_op_s, "backward": host.backward_op_s}.get(direction, host.op_s)
            if host.serial:  # the calls of a serial host are in the operators' own times
                each = max(0.0, each - host.op_s)
            return sum(each * len(_operators(part, direction)) for part in (*parts, *ends))
        if direction == "optimizer":
            return 0.0  # the law has it in `step_host_s`
        law = self.law.host
        share = law.graph_share if self.framework.graphs else 1.0
        if self.by_operators:
            launched = sum(len(_operators(part, direction)) for part in (*parts, *ends))
            return self.scale * law.layer_s * share * launched / LAYER_OPERATORS[direction]
        visits = 1.0 + (recomputed if direction == "backward" else 0.0)
        each_s = (law.moe_layer_s if part.expert_parameters > 0 else law.layer_s * share for part in parts)
        return self.scale * visits * sum(each_s)

    def lack_s(self, busy_s: float, host_s: float) -> float:
        """Seconds that a task which keeps the device busy for `busy_s` waits for the host, which needs `host_s`."""
        if self.profile is not None and self.profile.host is not None and self.profile.host.serial:
            return host_s
        blend = self.law.host.blend
        return float((busy_s**blend + host_s**blend) ** (1.0 / blend) - busy_s)


def _operators(part: Part, direction: Pass) -> tuple[Op, ...]:
    return {"forward": part.forward, "backward": part.backward, "optimizer": part.optimizer}[direction]
