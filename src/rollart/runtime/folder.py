"""A run's folder: who may write it, what is written to it, and from where the run in it can go on.

Invariants: one process has the folder at a time; whatever happens, the event log is closed and whole, and the summary, the
report and the timeline are written from it. A resumed run goes on in the same files, and each reads as the record of one run.
"""

from __future__ import annotations

import fcntl
import logging
import shlex
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from rollart.config.load import Resolved, dump, load_file
from rollart.config.schema import RunConfig
from rollart.core.errors import ClusterError, ConfigError, RollartError, StoreError
from rollart.core.events import Sink, header
from rollart.core.snapshot import Resumed
from rollart.observe.display import Display
from rollart.observe.jsonl import write_whole
from rollart.observe.log import Event, EventLog, EventWriter
from rollart.observe.metrics import MetricsWriter
from rollart.observe.past import Past, number_of, past_of
from rollart.observe.report import write_results
from rollart.observe.timeline import write_trace
from rollart.observe.trajectories import Encoded, Pieces, TrajectoryWriter
from rollart.runtime.checkpoint_reading import latest
from rollart.runtime.payload import TokenPayload
from rollart.runtime.tokenizers import Tokenizer

CONFIG, EVENTS, METRICS, TRAJECTORIES, CHECKPOINTS = (
    "config.yaml", "events.jsonl", "metrics.jsonl", "trajectories.jsonl", "checkpoints",
)  # fmt: skip

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Where a run begins or goes on, and which names are taken in its folder."""

    resumed: Resumed | None = None
    """None: a new run."""
    incarnation: int = 0
    first_engine: int = 0
    first_host: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Records:
    """What a run is written to while it goes on."""

    sinks: tuple[Sink, ...]
    keep: TrajectoryWriter
    flush: Callable[[], None]
    """Returns when all that was recorded is on disk; blocks."""


@contextmanager
def held(folder: Path, *, instead: str = "") -> Iterator[None]:
    """Only one process may write a run; the lock ends with its process.

    `instead`: what else can be done, beside waiting, when another process has the run.
    Raises ClusterError when another one has it, StoreError when the folder cannot be written.
    """
    path = folder / ".lock"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = path.open("w")
    except OSError as error:
        raise StoreError(f"{path}: cannot be opened for writing: {error.strerror}; check the folder") from error
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ClusterError(f"{folder} is in use by another process; wait for it or end it{instead}") from error
        except OSError as error:
            raise StoreError(
                f"{path}: cannot be locked: {error.strerror}; keep runs on a disk with file locks"
            ) from error
        yield


def keep_config(folder: Path, resolved: Resolved) -> None:
    """Write the configuration that a run goes on with; one that differs from it is kept as config-0.yaml, config-1.yaml, .."""
    path, number = folder / CONFIG, 0
    if path.is_file():
        if load_file(path).config == resolved.config:
            return
        while (folder / f"config-{number}.yaml").exists():
            number += 1
        write_whole(folder / f"config-{number}.yaml", path.read_text(encoding="utf-8"))
    write_whole(path, dump(resolved))


# --- going on --------------------------------------------------------------------------------------------------------


def where_from(folder: Path, config: RunConfig, *, thorough: bool = True) -> Start:
    """From where the run in `folder` goes on with `config`. Reads the whole log, and changes nothing.

    `thorough`: read every byte of the checkpoint too.
    Raises ConfigError when there is nothing to do or nothing to go on from, StoreError when what there is cannot be read.
    """
    past = past_of(folder / EVENTS)
    torn = () if past.torn is None else (str(past.torn),)
    try:
        found = latest(folder / CHECKPOINTS, past, thorough=thorough)
        if past.incarnations:
            EventLog(past.path, lambda torn: None)
    except StoreError as error:
        raise StoreError(
            f"{error}\nput back what is missing or damaged, or begin the run again: {_anew(folder)}"
        ) from error
    if found is None:
        _begins_anew(folder, past, config)
        resumed = Resumed(
            snapshot=None, lost=past.lost(0), highest_version=past.highest_version, notes=torn,
        )  # fmt: skip
        sampled: Sequence[str] = ()
    else:
        snapshot, trainer, notes = found
        _has_more(folder, past, snapshot.step, config.schedule.steps)
        notes += tuple(
            f"{one.why}; it stands after {trainer.parent.name}, so it is taken back"
            for one in past.broken_after(past.incarnations - 1, snapshot.seq)
        )
        resumed = Resumed(
            snapshot=snapshot, trainer=str(trainer), lost=past.lost(snapshot.seq),
            highest_version=max(past.highest_version, snapshot.version), notes=torn + notes,
        )  # fmt: skip
        sampled = tuple(snapshot.sampled)
    return Start(
        resumed=resumed,
        incarnation=past.incarnations,
        first_engine=max([past.next_engine, *(number_of(name) + 1 for name in sampled)]),
        first_host=past.next_host,
    )


def can_go_on(folder: Path) -> bool:
    """Whether the run in `folder` has a checkpoint from which `resume` would go on. Looks at sizes, not at every byte."""
    try:
        start = where_from(folder, load_file(folder / CONFIG).config, thorough=False)
    except RollartError:
        return False
    return start.resumed is not None and start.resumed.snapshot is not None


def _begins_anew(folder: Path, past: Past, config: RunConfig) -> None:
    """A run that died before its first checkpoint begins anew; one that kept none, or lost them, is not thrown away."""
    if past.checkpointed:
        raise StoreError(
            f"{folder / CHECKPOINTS}: is missing or empty, but the event log tells of checkpoints; put them back, or begin "
            f"the run again: {_anew(folder)}"
        )
    if past.trained:
        why = past.unkept or ("none was completed" if config.checkpoint.every else "checkpoint.every=0")
        raise ConfigError(
            f"{folder} has trained steps and kept no checkpoint ({why}) to go on from; begin it again: {_anew(folder)}"
        )


def _anew(folder: Path) -> str:
    """The command that starts a run as this one was configured."""
    return shlex.join(["rollart", "train", str(folder / CONFIG), "name=NAME"])


def _has_more(folder: Path, past: Past, trained: int, steps: int) -> None:
    done = past.ended is not None and past.ended.get("status") == "done"
    if trained > steps:
        raise ConfigError(
            f"schedule.steps={steps}: {trained} steps of {folder} are trained already; use schedule.steps={trained} or more"
        )
    if done and trained >= steps:
        raise ConfigError(
            f"{folder} is done: its {steps} steps are trained; to train more, say how many in all: rollart resume {folder} "
            f"schedule.steps={2 * steps}"
        )


# --- records ---------------------------------------------------------------------------------------------------------


def open_records(
    folder: Path, config: RunConfig, start: Start, tokenizer: Tokenizer, display: Display, stack: ExitStack
) -> Records:
    """Open the run's files, in a resumed run at the place where it goes on; `stack` closes them."""
    resumed = start.resumed
    history: Iterator[Event] = iter(())
    if resumed is not None and resumed.snapshot is not None:
        history = _replayed(folder / EVENTS, resumed.snapshot.seq, display)
    metrics = MetricsWriter(folder / METRICS, history)
    stack.callback(metrics.close)
    head = header(
        run=config.name, incarnation=start.incarnation, clock="monotonic", world=config.world.kind, git=_git()
    )
    append = resumed is not None
    events = EventWriter(folder / EVENTS, head, append=append)
    stack.callback(events.close)
    keep = TrajectoryWriter(folder / TRAJECTORIES, _encode, _pieces(tokenizer), append=append)
    stack.callback(keep.close)
    if keep.cut is not None:
        log.warning("%s", keep.cut)

    def flush() -> None:
        keep.flush()
        events.flush()

    return Records(sinks=(events, metrics, keep.note, display), keep=keep, flush=flush)


def _replayed(path: Path, last_seq: int, display: Display) -> Iterator[Event]:
    """The events that stand, shown to the display as they are read."""
    for event in EventLog(path, lambda torn: None).events():
        if event["seq"] > last_seq:
            return
        display.replay(event)
        yield event


@contextmanager
def results(folder: Path) -> Iterator[None]:
    """At the end, summary, report and timeline, also of a run that failed: what happened is in its log.

    Raises StoreError when they cannot be written, unless the run failed: then its own error is the one to see.
    """
    try:
        yield
    except BaseException:  # boundary: however a run ends, what happened in it is written down
        try:
            _write_results(folder)
        except StoreError as error:
            log.warning("%s", error)
        raise
    _write_results(folder)


def _write_results(folder: Path) -> None:
    if (folder / EVENTS).is_file():
        write_results(folder)
        write_trace(folder)


def _git() -> str:
    """The commit of the code that runs, where it runs from a checkout."""
    here = Path(__file__).resolve().parent
    command = ["git", "-C", str(here), "describe", "--always", "--dirty"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return found.stdout.strip()


def _encode(payload: object) -> Encoded:
    if not isinstance(payload, TokenPayload):
        return Encoded([], None)
    return Encoded(
        payload.ids.tolist(),
        None if payload.logprobs is None else payload.logprobs.tolist(),
        None if payload.log_kept_mass is None else payload.log_kept_mass.tolist(),
    )


def _pieces(tokenizer: Tokenizer) -> Pieces:
    """The text of each token id; most ids come up again and again."""
    known: dict[int, str] = {}

    def pieces(ids: Sequence[int]) -> Sequence[str]:
        for token in ids:
            if token not in known:
                known[token] = tokenizer.decode([token])
        return [known[token] for token in ids]

    return pieces
