"""From a resolved configuration to a finished run folder: the composition root of the local world.

Wires what runs on this machine; the records of a run are `folder.py`'s. Invariant: whatever happens, no process of the run
is left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from rollart.config.load import Resolved, load_file
from rollart.config.real import model_of, require_real
from rollart.config.schema import InlineWorld, RunConfig, VirtualWorld, VllmEngine
from rollart.control import run as control
from rollart.control.evaluate import Score
from rollart.control.garbage import spare_the_loop
from rollart.control.weights import VersionBook
from rollart.core.errors import RollartError, RunFailed, describe
from rollart.core.events import Recorder
from rollart.core.types import Failure, Manifest, TaskSpec, Version
from rollart.observe.display import Display, print_scores, print_summary
from rollart.observe.run_folder import CONFIG, held, keep_config, results
from rollart.ports import Trainer, World
from rollart.runtime import reap, room, usage
from rollart.runtime.actors import Actors, InlineActors, RayActors, start_ray, stop_ray
from rollart.runtime.checkpoints import DiskCheckpoints
from rollart.runtime.cluster import LocalCluster
from rollart.runtime.envs.baselines import Transcript, constant_baseline, random_baseline
from rollart.runtime.envs.tasks import eval_instances, task_specs
from rollart.runtime.envs.workers import raised
from rollart.runtime.folder import CHECKPOINTS, Start, open_records, where_from
from rollart.runtime.models import hf_config
from rollart.runtime.probe import model_scores
from rollart.runtime.saved import SavedWeights, load_model, save_model
from rollart.runtime.tokenizers import Tokenizer, build_tokenizer
from rollart.runtime.trainer.facade import RemoteTrainer, start_trainer


def train(resolved: Resolved, *, plain: bool) -> int:
    """Run to the end; returns the exit code. Raises RollartError when the run fails."""
    room.require(resolved.config)
    folder = Path(resolved.config.output_dir).expanduser() / resolved.config.name
    with held(folder, instead=", or use name=NAME"):
        _go(resolved, folder, Start(), plain=plain)
    print_summary(folder)
    return 0


def resume(run_dir: Path, resolved: Resolved, *, plain: bool) -> int:
    """Go on with the run in `run_dir`, wherever that was moved to, from its newest whole checkpoint to the end.

    Returns the exit code. Raises RollartError when the run fails, or cannot be gone on with: then its folder is as it was.
    """
    with held(run_dir):
        start = where_from(run_dir, resolved.config)
        room.require(resolved.config)
        _go(resolved, run_dir, start, plain=plain)
    print_summary(run_dir)
    return 0


def _go(resolved: Resolved, folder: Path, start: Start, *, plain: bool) -> None:
    """Wire the world of this machine and run control in it. What may refuse the run comes before the first file of it."""
    config = resolved.config
    with ExitStack() as stack:
        label = stack.enter_context(reap.labelled(folder))
        tokenizer = build_tokenizer(config.tokenizer)
        specs = _specs(config, tokenizer)
        keep_config(folder, resolved)
        display = Display(plain=plain)
        stack.callback(display.close)
        stack.enter_context(results(folder))
        records = open_records(folder, config, start, tokenizer, display, stack)
        actors = stack.enter_context(_actors(config, f"rollart-{config.name}", label))
        cluster = LocalCluster(
            config, tokenizer.vocab_size, actors, lambda: start_trainer(config, tokenizer.vocab_size, actors),
            first_engine=start.first_engine, first_host=start.first_host,
        )  # fmt: skip
        keep = config.checkpoint
        checkpoints = (
            DiskCheckpoints(folder / CHECKPOINTS, keep=keep.keep, incarnation=start.incarnation, flush=records.flush)
            if keep.every
            else None
        )
        world = World(
            name=config.world.kind, cluster=cluster, store=VersionBook(), tasks=specs, sinks=records.sinks,
            keep=records.keep, prepare=_Preparing(config, specs, tokenizer), checkpoints=checkpoints,
            resumed=start.resumed, beside=usage.beside(cluster.counts),
            conclude=_Keeping(config, folder, tokenizer.vocab_size),
        )  # fmt: skip
        spare_the_loop()
        asyncio.run(control.run(config, world))


def evaluate(run_dir: Path, *, instance_seed: int, count: int, greedy: bool) -> int:
    """Score a finished run's model on `count` instances per task drawn from `instance_seed`. Raises RollartError."""
    config = load_file(run_dir / CONFIG).config
    tokenizer = build_tokenizer(config.tokenizer)
    tensors, version = load_model(run_dir)
    drawn = {name: eval_instances(name, task, instance_seed, count) for name, task in config.tasks.items()}
    specs = [
        replace(
            spec,
            train=tuple(one.seed for one in drawn[spec.name] if one.split != "held_out"),
            held_out=tuple(one.seed for one in drawn[spec.name] if one.split == "held_out"),
        )
        for spec in _specs(config, tokenizer)
    ]
    room.require(config)
    with reap.labelled(run_dir, guest=True) as label, _actors(config, f"rollart-eval-{config.name}", label) as actors:
        scored = isinstance(config.engine, VllmEngine)
        probe = model_scores(hf_config(model_of(config), tokenizer.vocab_size), tensors) if scored else ()
        saved = SavedWeights(tensors, bucket_bytes=config.trainer.bucket_bytes, put=actors.put, probe=probe)
        scores = asyncio.run(_score(config, tokenizer, specs, actors, saved, version, greedy=greedy))
    known = {name: sum(one.split == "train" for one in ones) for name, ones in drawn.items()}
    print_scores(scores, instance_seed=instance_seed, known=known)
    return 0 if all(score.complete for score in scores) else 1


async def _score(
    config: RunConfig, tokenizer: Tokenizer, specs: Sequence[TaskSpec], actors: Actors, saved: SavedWeights,
    version: Version, *, greedy: bool,
) -> list[Score]:  # fmt: skip
    async def trainer() -> SavedWeights:
        return saved

    cluster = LocalCluster(config, tokenizer.vocab_size, actors, trainer)
    world = World(name=config.world.kind, cluster=cluster, store=VersionBook(), tasks=tuple(specs))
    result = await control.evaluate(config, world, version=version, mode="greedy" if greedy else "sampled")
    return result.evaluations["asked"]


def _specs(config: RunConfig, tokenizer: Tokenizer) -> tuple[TaskSpec, ...]:
    """The tasks, for which each environment is built once. Raises RunFailed with the failure when one cannot be."""
    try:
        return task_specs(config, tokenizer)
    except RollartError:
        raise
    # boundary: an environment's constructor and `canonical` are foreign code
    except Exception as error:
        raise RunFailed("an environment cannot say which problems it has; mend it", raised("env", error)) from error


@contextmanager
def _actors(config: RunConfig, namespace: str, label: reap.Label) -> Iterator[Actors]:
    """Where actors live, in the configured world, for as long as the run does."""
    if isinstance(config.world, InlineWorld):
        yield InlineActors()
        return
    if isinstance(config.world, VirtualWorld):
        require_real(config)
        return
    try:
        start_ray(config.world, namespace=namespace, label=label)
        yield RayActors(label.ray_folder)
    finally:
        stop_ray()


# --- before and after training -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Preparing:
    """Baselines, and the warm start on the random baseline's transcripts."""

    config: RunConfig
    specs: tuple[TaskSpec, ...]
    tokenizer: Tokenizer

    async def __call__(self, trainer: Trainer, record: Recorder) -> None:
        transcripts: list[Transcript] = []
        for spec in self.specs:
            transcripts += await self._baselines(spec, record)
        warm = self.config.warm_start
        if warm.steps and transcripts:
            assert isinstance(trainer, RemoteTrainer)
            done = await trainer.warm_start(
                transcripts, steps=warm.steps, batch=warm.batch, lr=warm.lr, seed=self.config.seed
            )
            record(
                "warm_started", steps=warm.steps, tokens=int(done["tokens"]), loss=done["loss"], seconds=done["seconds"]
            )

    async def _baselines(self, spec: TaskSpec, record: Recorder) -> list[Transcript]:
        """Record what a task gives away without learning; returns random transcripts."""
        config, task = self.config, self.config.tasks[spec.name]
        constant = await constant_baseline(spec, task, self.tokenizer, deadlines=config.deadlines, seed=config.seed)
        if constant is not None:
            record(
                "baseline", task=spec.name, policy="constant", success=constant.success, episodes=constant.episodes,
                answer=constant.answer, failed=len(constant.failures),
            )  # fmt: skip
            _advise(record, spec, "constant", constant.failures)
        blind = await random_baseline(
            spec, task, self.tokenizer, deadlines=config.deadlines, seed=config.seed, scored=config.baselines.episodes,
            episodes=max(config.baselines.episodes, config.warm_start.episodes if config.warm_start.steps else 0),
        )  # fmt: skip
        if blind is None:
            return []
        record(
            "baseline", task=spec.name, policy="random", success=blind.success, episodes=blind.episodes, answer="",
            failed=len(blind.failures),
        )  # fmt: skip
        _advise(record, spec, "random", blind.failures)
        return list(blind.transcripts[: config.warm_start.episodes])


def _advise(record: Recorder, spec: TaskSpec, policy: str, failures: Sequence[Failure]) -> None:
    """Tell of episodes that failed, whether or not they came out well when drawn again."""
    if failures:
        record(
            "advisory", code="baseline_failures",
            text=f"tasks.{spec.name}: {len(failures)} episode(s) of the {policy} baseline failed, the last one with "
            f"{describe(failures[-1])}",
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Keeping:
    """Keep the last published version as a model folder in the Hugging Face layout."""

    config: RunConfig
    folder: Path
    vocab_size: int

    async def __call__(self, manifest: Manifest) -> None:
        await save_model(self.folder, model_of(self.config), self.vocab_size, manifest)
