"""What became of each problem that a run issued, from its event log, and whether two runs consumed the same.

Invariant: every finding names the group (`train/task/epoch/index`) and what is wrong with it. A log that was resumed is
read as its readers give it: without what was taken back. Why: "nothing lost, nothing trained twice" is a promise about the
surviving history, and anyone must be able to check it from the log alone (design: definitions, field case 35).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollart.control.instances import Cursor
from rollart.core.types import TaskSpec

MOST_NAMED = 5
"""Groups that one finding names; a run that is wrong throughout has thousands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """What a surviving log says about groups."""

    issued: tuple[str, ...]
    """Groups in the order of their opening; one that was opened twice stands twice."""
    trained: Mapping[str, int]
    """Group -> in how many batches whose step was finished."""
    in_training: Mapping[str, int]
    """The same of batches that were released and whose step was not finished."""
    dropped: Mapping[str, tuple[str, ...]]
    """Group -> each reason for which it was dropped."""
    completed: frozenset[str]
    steps: tuple[int, ...]
    """Steps that were finished, rising, each once."""
    batches: Mapping[int, int]
    """Step -> how many batches were released for it."""
    resumed: tuple[tuple[int, int], ...]
    """(from_seq, lost) of each resumption that stands."""
    done: bool
    """The run came to its own end."""

    @property
    def buffered(self) -> frozenset[str]:
        return self.completed - self.trained.keys() - self.in_training.keys() - self.dropped.keys()

    @property
    def in_flight(self) -> frozenset[str]:
        """Issued, and neither complete nor dropped; those of a batch that was being trained as well."""
        return (
            (frozenset(self.issued) - self.completed - self.dropped.keys()) | self.in_training.keys()
        ) - self.trained.keys()


def account(events: Iterable[Mapping[str, Any]]) -> Account:
    """Fold the surviving events of one run."""
    issued: list[str] = []
    released: list[tuple[int, list[str]]] = []
    dropped: dict[str, tuple[str, ...]] = {}
    completed: set[str] = set()
    steps: set[int] = set()
    resumed: list[tuple[int, int]] = []
    done = False
    for event in events:
        data = event["data"]
        match event["kind"]:
            case "group_opened":
                issued.append(event["group"])
            case "group_completed":
                completed.add(event["group"])
            case "group_dropped":
                dropped[event["group"]] = (*dropped.get(event["group"], ()), data["reason"])
            case "batch_released":
                released.append((event["step"], data["groups"]))
            case "step_finished":
                steps.add(event["step"])
            case "resumed":
                resumed.append((data["from_seq"], data["lost"]))
            case "run_finished":
                done = data["status"] == "done"
    return Account(
        issued=tuple(issued),
        trained=Counter(group for step, groups in released if step in steps for group in groups),
        in_training=Counter(group for step, groups in released if step not in steps for group in groups),
        dropped=dropped,
        completed=frozenset(completed),
        steps=tuple(sorted(steps)),
        batches=Counter(step for step, _ in released),
        resumed=tuple(resumed),
        done=done,
    )


def faults(found: Account, specs: Sequence[TaskSpec], seed: int) -> list[str]:
    """What does not hold of one run: a line each, none when everything does.

    Per task the issued instances are a prefix of the cursor's order, and each of them was trained once, dropped once with
    a reason, or is buffered or in flight (the last two only in a run that did not come to its end).
    """
    issued = frozenset(found.issued)
    uses = Counter(found.trained) + Counter(found.in_training)
    ends = uses + Counter({group: len(reasons) for group, reasons in found.dropped.items()})
    lines = [
        _line(_over(Counter(found.issued)), "issued more than once"),
        _line(_over(uses), "trained more than once"),
        _line((uses.keys() & found.dropped.keys()), "trained, and dropped as well"),
        _line({group for group, reasons in found.dropped.items() if len(reasons) > 1}, "dropped more than once"),
        _line({group for group, reasons in found.dropped.items() if not all(reasons)}, "dropped without a reason"),
        _line(ends.keys() - issued, "trained or dropped, and never issued"),
        _line(found.completed - issued, "completed, and never issued"),
        _line(uses.keys() - found.completed, "trained, and never completed"),
        _line(
            {str(step) for step, n in found.batches.items() if n > 1},
            "steps for which more than one batch was released",
        ),
    ]
    if found.done:
        lines.append(_line(issued - ends.keys(), "issued, and neither trained nor dropped when the run was done"))
    return [*(line for line in lines if line), *_out_of_order(found.issued, specs, seed)]


def _over(counts: Mapping[str, int]) -> set[str]:
    return {group for group, n in counts.items() if n > 1}


def _line(groups: Iterable[str], what: str) -> str:
    names = sorted(groups)
    if not names:
        return ""
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return f"{len(names)} {what}: {', '.join(names[:MOST_NAMED])}{more}"


def _out_of_order(issued: Sequence[str], specs: Sequence[TaskSpec], seed: int) -> list[str]:
    """The first issued instance of each task that is not the one its cursor gives."""
    by_task: dict[str, list[str]] = defaultdict(list)
    for group in issued:
        by_task[_task(group)].append(group)
    known = {spec.name: spec for spec in specs}
    lines = [f"task {name} was issued, and the run has no such task" for name in sorted(by_task.keys() - known.keys())]
    for name, spec in known.items():
        cursor = Cursor(spec, seed)
        for number, group in enumerate(by_task[name], start=1):
            wanted = cursor.next().group_id
            if group != wanted:
                lines.append(f"task {name}: issued as number {number} was {group}, its cursor gives {wanted}")
                break
    return lines


def _task(group: str) -> str:
    return group.split("/")[1]


Prompt = tuple[str, int]
"""Task and seed: the problem that a group attempts, whatever its epoch."""


def prompts(found: Account, specs: Sequence[TaskSpec]) -> Counter[Prompt]:
    """The problems that were trained, with how often."""
    seeds = {spec.name: spec.train for spec in specs}
    counted: Counter[Prompt] = Counter()
    for group, times in found.trained.items():
        _, task, _, index = group.split("/")
        counted[task, seeds[task][int(index)]] += times
    return counted


def differences(one: Counter[Prompt], other: Counter[Prompt]) -> list[str]:
    """Problems that one run consumed more often than the other: a line per side, none when the multisets are equal."""
    lines = [
        _line(
            (f"{task} seed {seed} (x{n})" for (task, seed), n in (one - other).items()),
            "consumed by the first run only",
        ),
        _line(
            (f"{task} seed {seed} (x{n})" for (task, seed), n in (other - one).items()), "consumed by the second only"
        ),
    ]
    return [line for line in lines if line]
