"""A table of step times: what a prediction or a measurement says of one training job, for others to read.

Owns `StepTable` and its file. Invariants: every table says what its seconds rest on; a longer sequence or one more
micro-batch never takes less; nothing is said of sequences longer than the table's longest. Why: who simulates a trainer
needs seconds and not the tracer that they came from, and a file can be kept, looked at and compared.

The rule between rows. At one length a step is a line in the number of micro-batches, through the rows with the fewest and
the most: seconds of one more micro-batch, and seconds beside them (bubble, gradients, optimizer, host). Between lengths,
seconds per token are a line where they rise (attention grows with the square), else the seconds themselves; below the
shortest length the first line goes on, but never below tokens in proportion.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from rollart.core.errors import ConfigError, StoreError
from rollart.perf.train_plan import TrainingPlan

FORMAT = "rollart step table 1"
TOLERATED = 1e-9
"""Shares that sum to one up to rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """One step. `sequence` in tokens, `micro_batches` of a data-parallel rank."""

    sequence: int
    micro_batches: int
    seconds: float
    log_std: float = 0.0
    """Standard deviation of the log of `seconds`; 0: not known."""


@dataclass(frozen=True, kw_only=True)
class StepTable:
    """Seconds of steps of one job that differ in the length of sequences and in micro-batches only."""

    model: str
    parameters: float
    device: str
    interconnect: str
    framework: str
    plan: TrainingPlan
    """Degrees, size of a micro-batch, precision and recomputation of all rows; its own batch and length are those that were
    asked for."""
    memory_bytes: float
    """Of the rank that needs most, at the longest sequence."""
    rows: tuple[StepRow, ...]
    provenance: Mapping[str, float] = field(default_factory=dict)
    """Share of the step's work by what its seconds rest on: measured, interpolated, analytic."""
    sources: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check(self)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that the table speaks of."""
        return max(row.sequence for row in self.rows)

    @cached_property
    def _lines(self) -> tuple[tuple[float, float, float], ...]:
        """(sequence, seconds of one more micro-batch, seconds beside them), by rising sequence."""
        ordered = sorted(self.rows, key=lambda row: (row.sequence, row.micro_batches))
        found: list[tuple[float, float, float]] = []
        least = 0.0
        for sequence, group in groupby(ordered, key=lambda row: row.sequence):
            at = list(group)
            few, many = at[0], at[-1]
            each = (many.seconds - few.seconds) / (many.micro_batches - few.micro_batches)
            # tiles that a length fills exactly make it faster than a shorter one; lengths as they come are not
            least = max(least, each)
            found.append((float(sequence), least, max(0.0, many.seconds - each * many.micro_batches)))
        return tuple(found)

    def micro_batch_s(self, sequence: float) -> float:
        """Seconds that one more micro-batch of sequences of this length adds. Raises ConfigError beyond the longest."""
        if sequence > self.longest:
            raise ConfigError(
                f"step table of {self.model}: {sequence:g} tokens are more than its longest sequence of {self.longest}; "
                f"use at most {self.longest}, or write a table with --seq {math.ceil(sequence)}"
            )
        lengths = [line[0] for line in self._lines]
        if len(lengths) == 1:
            return self._lines[0][1] * sequence / lengths[0]
        after = min(max(sum(length < sequence for length in lengths), 1), len(lengths) - 1)
        (short, less, _), (long, more, _) = self._lines[after - 1], self._lines[after]
        share = (sequence - short) / (long - short)
        by_line = less + share * (more - less)
        if share < 0.0:
            return max(by_line, less * sequence / short)
        if more / long < less / short:
            return by_line
        return sequence * (less / short + share * (more / long - less / short))

    def beside_s(self, sequence: float) -> float:
        """Seconds of a step beside its micro-batches, at this length; the nearest row's outside of the table."""
        lengths = [line[0] for line in self._lines]
        values = [line[2] for line in self._lines]
        if sequence <= lengths[0]:
            return values[0]
        for (short, low), (long, high) in pairwise(zip(lengths, values, strict=True)):
            if sequence <= long:
                return low + (high - low) * (sequence - short) / (long - short)
        return values[-1]

    def seconds(self, sequence: float, micro_batches: float) -> float:
        """Seconds of a step of `micro_batches` micro-batches of sequences of this length."""
        return self.beside_s(sequence) + micro_batches * self.micro_batch_s(sequence)


def _check(table: StepTable) -> None:
    where = f"step table of {table.model or 'a model'}"
    for row in table.rows:
        if row.sequence < 1 or row.micro_batches < 1:
            raise ConfigError(
                f"{where}: a row has sequence {row.sequence} and micro_batches {row.micro_batches}; both are at least 1"
            )
        if not (math.isfinite(row.seconds) and row.seconds > 0 and math.isfinite(row.log_std) and row.log_std >= 0):
            raise ConfigError(
                f"{where}: {row.seconds} s (log_std {row.log_std}) at sequence {row.sequence}; need a finite time above 0 and "
                "a spread of at least 0"
            )
    for sequence in sorted({row.sequence for row in table.rows}):
        at = sorted((row.micro_batches, row.seconds) for row in table.rows if row.sequence == sequence)
        if len({count for count, _ in at}) != len(at) or len(at) < 2:
            raise ConfigError(
                f"{where}: sequence {sequence} has micro_batches {[count for count, _ in at]}; need two or more, each once"
            )
        if any(later[1] < earlier[1] for earlier, later in pairwise(at)):
            raise ConfigError(f"{where}: at sequence {sequence} more micro-batches take less time: {at}")
    if not table.rows:
        raise ConfigError(f"{where}: it has no rows")
    if not (math.isfinite(table.memory_bytes) and table.memory_bytes >= 0 and table.parameters > 0):
        raise ConfigError(
            f"{where}: memory_bytes {table.memory_bytes}, parameters {table.parameters}; need numbers, parameters above 0"
        )
    total = sum(table.provenance.values())
    if table.provenance and (min(table.provenance.values()) < 0 or abs(total - 1.0) > TOLERATED + 1e-3):
        raise ConfigError(f"{where}: provenance {dict(table.provenance)} sums to {total:g}; shares sum to 1")


# ---- the file

_PLAIN = ("model", "parameters", "device", "interconnect", "framework", "memory_bytes")


def as_json(table: StepTable) -> dict[str, Any]:
    """The table as plain values."""
    return {
        "format": FORMAT,
        **{name: getattr(table, name) for name in _PLAIN},
        "plan": asdict(table.plan),
        "provenance": dict(table.provenance),
        "sources": list(table.sources),
        "notes": list(table.notes),
        "rows": [asdict(row) for row in table.rows],
    }


def from_json(loaded: Mapping[str, Any], where: str = "step table") -> StepTable:
    """The table that `as_json` wrote. Raises ConfigError naming what is missing or cannot be."""
    if loaded.get("format") != FORMAT:
        raise ConfigError(
            f"{where}: format is {loaded.get('format')!r}, need {FORMAT!r}; write it with `rollart trace .. --table FILE`"
        )
    try:
        plan = TrainingPlan(**_known(TrainingPlan, loaded["plan"], f"{where}: plan"))
        rows = tuple(StepRow(**_known(StepRow, row, f"{where}: rows")) for row in loaded["rows"])
        return StepTable(
            **{name: loaded[name] for name in _PLAIN}, plan=plan, rows=rows, provenance=dict(loaded.get("provenance", {})),
            sources=tuple(loaded.get("sources", ())), notes=tuple(loaded.get("notes", ())),
        )  # fmt: skip
    except KeyError as error:
        raise ConfigError(
            f"{where}: {error.args[0]} is missing; write it with `rollart trace .. --table FILE`"
        ) from error
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where}: a value is of the wrong kind ({error})") from error


def _known(of: Any, values: Any, where: str) -> dict[str, Any]:
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where}: {values!r} is no map of names to values")
    names = {one.name for one in fields(of)}
    if not set(values) <= names:
        raise ConfigError(
            f"{where}: unknown {', '.join(sorted(set(values) - names))}; known: {', '.join(sorted(names))}"
        )
    return dict(values)


def read_step_table(path: Path) -> StepTable:
    """The table in a file. Raises ConfigError."""
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"step table {path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"step table {path}: is no JSON ({error})") from error
    if not isinstance(loaded, Mapping):
        raise ConfigError(f"step table {path}: is no map; write it with `rollart trace .. --table FILE`")
    return from_json(loaded, f"step table {path}")


def write_step_table(path: Path, table: StepTable) -> None:
    """Raises StoreError."""
    try:
        path.write_text(json.dumps(as_json(table), indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise StoreError(f"{path}: cannot be written: {error.strerror}") from error


def lengths_for(longest: int, given: Sequence[int] = (), *, multiple: int = 1) -> tuple[int, ...]:
    """Lengths to ask for: those given, else the longest and four halvings of it, all multiples of `multiple`."""
    asked = given or [longest // 2**halving for halving in range(5)]
    return tuple(sorted({max(multiple, length // multiple * multiple) for length in asked}))
