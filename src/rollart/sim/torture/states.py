"""Where every attempt, group and trainer of a simulated run stands, read off its events as they come.

Invariant: knows what the log says and nothing else, so that coverage is told in the words of `core.lifecycle`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

Key = tuple[str, int]


class States:
    def __init__(self) -> None:
        self.attempts: dict[Key, str] = {}
        self.groups: dict[str, str] = {}
        self._group_of: dict[Key, str] = {}
        self._engine_of: dict[Key, str] = {}
        self._host_of: dict[Key, str] = {}
        self._routed_last: Key = ("", 0)

    def take(self, event: Mapping[str, Any]) -> None:
        handle = _HANDLERS.get(event["kind"])
        if handle is not None:
            handle(self, event)

    # --- what stands where -------------------------------------------------------------------------------------------

    def of_attempt(self, traj: str, attempt: int) -> Iterator[str]:
        key = (traj, attempt)
        if key in self.attempts:
            yield f"attempt {self.attempts[key]}"
        group = self._group_of.get(key)
        if group in self.groups:
            yield f"group {self.groups[group]}"

    def newest_route(self) -> Iterator[str]:
        """The attempt whose turn was routed last."""
        return self.of_attempt(*self._routed_last)

    def on_engines(self, names: set[str]) -> Iterator[str]:
        return (f"attempt {state}" for key, state in self.attempts.items() if self._engine_of.get(key) in names)

    def on_hosts(self, names: set[str]) -> Iterator[str]:
        return (f"attempt {state}" for key, state in self.attempts.items() if self._host_of.get(key) in names)

    def all_attempts(self) -> Iterator[str]:
        return (f"attempt {state}" for state in self.attempts.values())

    def all_groups(self) -> Iterator[str]:
        return (f"group {state}" for state in self.groups.values() if state in ("open", "buffered", "training"))

    def moved(self, traj: str, attempt: int, state: str) -> None:
        """What no event says: scoring has begun."""
        if (traj, attempt) in self.attempts:
            self.attempts[traj, attempt] = state

    # --- events ------------------------------------------------------------------------------------------------------

    def _started(self, event: Mapping[str, Any]) -> None:
        key = (event["traj"], event["attempt"])
        self.attempts[key] = "opening"
        self._group_of[key] = event["group"]

    def _opened(self, event: Mapping[str, Any]) -> None:
        self._host_of[event["traj"], event["attempt"]] = event["host"]

    def _routed(self, event: Mapping[str, Any]) -> None:
        key = (event["traj"], event["attempt"])
        self.attempts[key] = "generating"
        self._engine_of[key] = event["engine"]
        self._routed_last = key

    def _turn(self, event: Mapping[str, Any]) -> None:
        if event["data"]["finish"] in ("stop", "length"):
            self.attempts[event["traj"], event["attempt"]] = "stepping"

    def _stepped(self, event: Mapping[str, Any]) -> None:
        self.attempts[event["traj"], event["attempt"]] = "generating"

    def _finished(self, event: Mapping[str, Any]) -> None:
        key = (event["traj"], event["attempt"])
        for book in (self.attempts, self._group_of, self._engine_of, self._host_of):
            book.pop(key, None)

    def _group(self, event: Mapping[str, Any]) -> None:
        self.groups[event["group"]] = _GROUP_STATE[event["kind"]]

    def _released(self, event: Mapping[str, Any]) -> None:
        for group in event["data"]["groups"]:
            self.groups[group] = "training"

    def _published(self, event: Mapping[str, Any]) -> None:
        if "again" not in event["data"]:
            for group, state in self.groups.items():
                if state == "training":
                    self.groups[group] = "trained"


_GROUP_STATE = {"group_opened": "open", "group_completed": "buffered", "group_dropped": "dropped"}
_HANDLERS = {
    "traj_started": States._started,
    "env_opened": States._opened,
    "turn_routed": States._routed,
    "turn_done": States._turn,
    "env_stepped": States._stepped,
    "traj_finished": States._finished,
    **dict.fromkeys(_GROUP_STATE, States._group),
    "batch_released": States._released,
    "published": States._published,
}
