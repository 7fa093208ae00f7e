"""What the figures of a simulation rest on, and what a user should know of its configuration, in lines to print.

Invariant: each model that a figure depends on is named with where its numbers are from, the least certain one included.
"""

from __future__ import annotations

from collections.abc import Mapping

from rollart.config.placement import colocated_pools, idle_devices, in_turn, layout
from rollart.config.schema import RunConfig
from rollart.core.resources import Degrees
from rollart.perf.calibrated import inference_calibration, pair_key
from rollart.sim.deadlines import deadline_notes
from rollart.sim.hardware import EngineHardware, Hardware
from rollart.sim.training import TrainerHardware
from rollart.sim.transfer import WeightPath
from rollart.sim.workload import Draws

GB = 1e9
LEAST_SHARE = 0.005
"""Less is 0 in whole per cents."""


def basis(
    config: RunConfig, hardware: Hardware, trainer: TrainerHardware, engines: Mapping[str, EngineHardware],
    paths: Mapping[str, WeightPath], draws: Mapping[str, Draws],
) -> tuple[str, ...]:  # fmt: skip
    """A line for the model, each pool's devices and engine, the trainer, the link and each workload."""
    shape = hardware.shape
    lines = [f"model {shape.name}: {shape.parameters / 1e9:.2f}e9 parameters ({shape.source})"]
    lines += [_engine_line(config, hardware, engine) for engine in engines.values()]
    lines.append(_trainer_line(trainer))
    lines += [_path_line(config, name, path, trainer.weight_bytes) for name, path in paths.items()]
    lines += [_load_line(name, own) for name, own in draws.items()]
    return tuple(lines)


def _degrees(degrees: Degrees) -> str:
    return " x ".join(f"{label} {n}" for label, n in zip(degrees._fields, degrees, strict=True) if n > 1) or "tp 1"


def _engine_line(config: RunConfig, hardware: Hardware, engine: EngineHardware) -> str:
    device, server = engine.device, engine.cost.server
    factor = server.cost.factor
    known = pair_key(hardware.engine_name, device.name) in inference_calibration().constants
    whence = "fitted to published measurements of the pair" if known else "no measurement of the pair: its kin's"
    return (
        f"engines of pool {engine.pool}: {engine.facts.name} on {_degrees(engine.degrees)} of {device.name} ({device.source}); "
        f"constant {factor:.2f} ({whence}); {engine.kv_tokens} tokens of cache, {engine.rules.max_live} sequences, "
        f"{engine.rules.step_tokens} tokens a step"
    )


def _trainer_line(trainer: TrainerHardware) -> str:
    plan, law = trainer.plan, trainer.law
    constant, whence = law.constants.scale(law.framework, law.fabric.chip)
    rests = f"constant {constant:.2f} ({whence})"
    if trainer.table is not None:
        shares = ", ".join(
            f"{share:.0%} {name}" for name, share in trainer.table.provenance.items() if share >= LEAST_SHARE
        )
        rests = f"seconds from a table of step times ({shares or 'what they rest on is not told'})"
    return (
        f"trainer: {law.framework} on {plan.devices} {law.device.name} ({law.device.source}), tp {plan.tp} x pp {plan.pp} x cp "
        f"{plan.cp} x dp {plan.dp}, recomputation {plan.recompute}; {rests}"
    )


def _path_line(config: RunConfig, pool: str, path: WeightPath, n_bytes: int) -> str:
    size = f"{n_bytes / GB:.1f} GB"
    if pool in colocated_pools(config):
        return f"weights to pool {pool}: {size} resharded on the trainer's own devices in {path.load_s:.1f} s"
    return (
        f"weights to pool {pool}: {size}, push {path.push_s:.1f} s, pull {path.pull_s:.1f} s, of which {path.exposed_s:.1f} s "
        "exposed (cluster.link; its defaults are RollArt's)"
    )


def _load_line(task: str, own: Draws) -> str:
    weakest = ", ".join(name for name, (_, kind) in own.load.sources.items() if kind == own.load.certainty)
    return f"task {task}: {own.load.certainty} ({weakest or 'no sources given'}); {own.load.about}"


def _device_lines(config: RunConfig, engines: Mapping[str, EngineHardware]) -> list[str]:
    """Devices that no engine is on, and engines that are larger than a node."""
    pools = layout(config)
    lines = [
        f"cluster.pools.{name}: {n} of {pools[name].devices} devices are in no engine, which takes {engines[name].ranks} of a "
        f"node's {pools[name].devices_per_node}; they are paid for all the same"
        for name, n in idle_devices(config).items()
    ]
    lines += [
        f"cluster.pools.{name}: an engine of {engine.ranks} devices is larger than a node of {pools[name].devices_per_node}; "
        "what goes between its nodes is counted at the rate within one"
        for name, engine in engines.items()
        if engine.ranks > pools[name].devices_per_node
    ]
    return lines


def notes(
    config: RunConfig, hardware: Hardware, draws: Mapping[str, Draws], trainer: TrainerHardware,
    engines: Mapping[str, EngineHardware], costs: Mapping[str, float],
) -> tuple[str, ...]:  # fmt: skip
    """Schedules that can never overlap, devices that idle, workloads that a task's limits cut, costs that are not known."""
    lines: list[str] = []
    schedule = config.schedule
    shared = sorted(colocated_pools(config))
    if schedule.colocated:
        lines.append("schedule.colocated=true: rollout and training take turns on the same devices and never overlap")
    elif in_turn(config):
        lines.append(
            f"cluster.pools.{', '.join(shared)} has roles train and mixed: rollout and training take turns on the same devices "
            "and never overlap"
        )
    elif schedule.max_staleness == 0:
        lines.append(
            "schedule.max_staleness=0: rollout waits for the weights of every step, so it never overlaps training; "
            "use max_staleness=1 or more"
        )
    if shared and not schedule.colocated and not in_turn(config):
        lines.append(
            f"cluster.pools.{', '.join(shared)} has roles train and mixed: its engines stand still while it trains, others go "
            "on"
        )
    lines += _device_lines(config, engines)
    for name, own in draws.items():
        turns, most = own.load.turns.at(0.5), config.tasks[name].max_turns
        if turns > most:
            lines.append(f"tasks.{name}.max_turns={most} cuts its load, which takes {turns:.0f} turns in the middle")
        median = own.load.response.median
        if median > config.tasks[name].max_tokens:
            lines.append(
                f"tasks.{name}.max_tokens={config.tasks[name].max_tokens} cuts turns of {median:.0f} tokens in the middle"
            )
    lines += deadline_notes(config, draws)
    unpriced = [name for name, cost in costs.items() if not cost]
    lines += [
        f"cluster.pools.{name}: no source gives its device's cost; set cluster.pools.{name}.cost" for name in unpriced
    ]
    if hardware.facts.reserves:
        lines.append(
            f"engine.name={hardware.engine_name} keeps cache for a whole answer before it begins; here it is taken as it grows"
        )
    if trainer.plan.recompute == "full":
        lines.append("trainer.plan.recompute=full: every forward pass is computed twice")
    return tuple(lines)
