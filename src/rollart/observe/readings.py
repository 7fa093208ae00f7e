"""Trajectories to read in the report: a few per task from early to late, with what the policy thought of each token.

Invariant: the choice follows from events alone (the best and the worst of the first, a middle and the last step, and
attempts that failed or were aborted), so it is no selection by hand.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rollart.observe.jsonl import parse, raw_lines
from rollart.observe.log import Event
from rollart.observe.members import Finished, Members
from rollart.observe.metrics import steps_done
from rollart.observe.tally import Versions
from rollart.observe.trajectories import Standing

MAX_TOKENS = 1_500
"""Tokens of one trajectory in the page; the file has the rest."""
OTHERS = 1
"""Failed and aborted attempts shown per task and kind."""


class Pick(NamedTuple):
    traj: str
    attempt: int
    task: str
    when: str
    reward: float | None
    staleness: int | None


class Picks:
    """Feed events in order. Keeps the best and the worst trajectory of each step and task."""

    def __init__(self) -> None:
        self._members = Members()
        self._versions = Versions()
        self._steps: dict[str, dict[int, tuple[Pick, Pick]]] = {}
        self._others: dict[tuple[str, str], list[Pick]] = {}

    def __call__(self, event: Event) -> None:
        kind, data = event["kind"], event["data"]
        if kind == "group_opened":
            self._members.opened(event["group"])
        elif kind == "published":
            self._versions.published(event)
        elif kind == "group_completed":
            self._members.completed(event["group"], data["members"])
        elif kind == "group_dropped":
            self._members.take(event["group"])
        elif kind == "batch_released":
            for group in data["groups"]:
                self._released(self._members.take(group), steps_done(event), event["version"])
        elif kind == "traj_finished" and data["purpose"] == "train":
            if data["status"] == "done" and data["reward"] is not None:
                self._members.finished(event)
            elif data["sampled"]:
                others = self._others.setdefault((event["task"], data["status"]), [])
                if len(others) < OTHERS:
                    when = f"{data['status']}: {data['cause']}"
                    others.append(Pick(event["traj"], event["attempt"], event["task"], when, data["reward"], None))

    def _released(self, members: list[Finished], step: int, version: int) -> None:
        if not members:
            return
        picks = [self._pick(member, step, version) for member in members]
        steps = self._steps.setdefault(members[0].task, {})
        known = steps.get(step, (picks[0], picks[0]))
        worst = min((known[0], *picks), key=lambda pick: pick.reward or 0.0)
        best = max((known[1], *picks), key=lambda pick: pick.reward or 0.0)
        steps[step] = worst, best

    def _pick(self, member: Finished, step: int, version: int) -> Pick:
        oldest = member.oldest_version
        staleness = None if oldest is None else self._versions.staleness(version, oldest)
        return Pick(member.traj, member.attempt, member.task, f"step {step}", member.reward, staleness)

    def chosen(self) -> list[Pick]:
        """Per task: worst and best of the first, the middle and the last step that trained it, then the others."""
        picks: list[Pick] = []
        for task, steps in sorted(self._steps.items()):
            known = sorted(steps)
            for step in sorted({known[0], known[len(known) // 3], known[-1]}):
                worst, best = steps[step]
                picks += [worst] if worst.traj == best.traj or worst.reward == best.reward else [worst, best]
            picks += [pick for (name, _), others in sorted(self._others.items()) if name == task for pick in others]
        return picks


def readings_of(path: Path, picks: Picks) -> list[dict[str, Any]]:
    """The chosen trajectories as the page wants them; empty where the run kept none. Raises StoreError."""
    chosen = {(pick.traj, pick.attempt): pick for pick in picks.chosen()}
    if not chosen or not path.exists():
        return []
    heads, standing = {_head(traj) for traj, _ in chosen}, Standing(path)
    found: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for offset, line in raw_lines(path, lambda torn: None):
        if line[: line.find(b",")] not in heads:
            continue
        row = parse(path, offset, line)
        key = (row["traj"], row["attempt"])
        if key in chosen and standing.has(offset, row):
            found.setdefault(key, []).append(row)
    return [_reading(pick, found[key]) for key, pick in chosen.items() if key in found]


def _head(traj: str) -> bytes:
    """How a row of this trajectory begins: most lines need no parsing."""
    return b'{"traj":' + json.dumps(traj).encode()


def _reading(pick: Pick, segments: list[dict[str, Any]]) -> dict[str, Any]:
    first = segments[0]
    runs = [run for segment in segments for run in _runs(segment)]
    return {
        "id": pick.traj,
        "attempt": pick.attempt,
        "task": pick.task,
        "when": pick.when,
        "reward": pick.reward,
        "staleness": pick.staleness,
        "status": first["status"],
        "cause": first["cause"],
        "turns": first["turns"],
        "bad_actions": first["bad_actions"],
        "sampled": sum(sum(segment["loss_mask"]) for segment in segments),
        "spans": [span for segment in segments for span in segment["spans"]],
        "seconds": first["timings"].get("total"),
        "runs": runs,
    }


def _runs(segment: Mapping[str, Any]) -> Iterator[list[Any]]:
    """[0, text] for what others wrote; [1, token texts, log-probabilities, versions] for what the policy sampled."""
    text, mask, logprobs = segment["text"], segment["loss_mask"], segment["rollout_logprobs"]
    lengths = segment.get("token_chars") or [1] * len(mask)
    versions = iter([version for version, n in segment["spans"] for _ in range(n)])
    at = char = 0
    while at < min(len(mask), MAX_TOKENS):
        end = at
        while end < len(mask) and mask[end] == mask[at]:
            end += 1
        texts = []
        for length in lengths[at:end]:
            texts.append(text[char : char + length])
            char += length
        if mask[at]:
            values = [None if value is None else round(value, 2) for value in logprobs[at:end]]
            yield [1, texts, values, [next(versions, None) for _ in texts]]
        else:
            yield [0, "".join(texts)]
        at = end
    if at < len(mask):
        yield [0, f"\n[{len(mask) - at} more tokens]"]
