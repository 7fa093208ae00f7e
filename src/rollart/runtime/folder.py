"""The records of a run on devices: what is written while it goes on, and from where the run in a folder can go on.

Invariants: whatever happens, the event log is closed and whole. A resumed run goes on in the same files, and each reads as
the record of one run. The folder itself is `observe.run_folder`'s.
"""

from __future__ import annotations

import logging
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from rollart.config.load import load_file
from rollart.config.schema import RunConfig
from rollart.core.errors import ConfigError, RollartError, StoreError
from rollart.core.events import Sink, header
from rollart.core.snapshot import Resumed
from rollart.observe.display import Display
from rollart.observe.log import Event, EventLog, EventWriter
from rollart.observe.metrics import MetricsFold, MetricsWriter
from rollart.observe.past import Past, number_of, past_of
from rollart.observe.run_folder import CONFIG, EVENTS, METRICS, checkout
from rollart.observe.trajectories import Encoded, Pieces, TrajectoryWriter
from rollart.runtime.checkpoint_reading import latest
from rollart.runtime.payload import TokenPayload
from rollart.runtime.tokenizers import Tokenizer

TRAJECTORIES, CHECKPOINTS = "trajectories.jsonl", "checkpoints"

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
    fold = MetricsFold()
    display.follow(fold)
    metrics = MetricsWriter(folder / METRICS, history, fold=fold)
    stack.callback(metrics.close)
    head = header(
        run=config.name, incarnation=start.incarnation, clock="monotonic", world=config.world.kind, git=checkout()
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
    """The events that stand, each shown to the display once it was taken."""
    for event in EventLog(path, lambda torn: None).events():
        if event["seq"] > last_seq:
            return
        yield event
        display.replay(event)


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
