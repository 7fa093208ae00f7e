"""What interrupted a run, and how long it took to go on: resumes, trainers, engines and environment hosts that were lost.

Invariant: computed from the surviving events alone. Recovery is counted in the run's own time, to the event that shows that
what was lost is there again: the first turn after a resume, weights of another trainer, another engine, another host. An engine
that is lost before it serves interrupts nothing; it is counted apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rollart.observe.fault_tally import RUN_ENDED
from rollart.observe.log import Event
from rollart.observe.tally import Stat

ROLES = ("run", "trainer", "engine", "host")
BACK = {
    "turn_done": "run", "published": "trainer", "trainer_restarted": "trainer", "engine_joined": "engine",
    "host_joined": "host",
}  # fmt: skip
"""Event that ends an interruption of a role."""


@dataclass(slots=True, kw_only=True)
class Interruption:
    role: str
    t: float
    """Seconds since the run began."""
    who: str
    why: str
    lost: str
    """What work it cost, in plain words; empty: none."""
    recover_s: float | None = None
    """None: it did not recover before the log ends."""

    def __str__(self) -> str:
        back = "not recovered by the end" if self.recover_s is None else f"went on after {self.recover_s:.1f} s"
        why = f" ({self.why})" if self.why else ""
        return f"{self.t:.1f} s: {self.who}{why}; {self.lost + '; ' if self.lost else ''}{back}"


class InterruptionsFold:
    """Feed events in order."""

    def __init__(self) -> None:
        self.found: list[Interruption] = []
        self._open: dict[str, list[Interruption]] = {role: [] for role in ROLES}
        self._engines: set[str] = set()
        """Of this incarnation: the books of earlier ones are closed with `engine_lost` as well."""
        self._served: set[str] = set()
        """Of all incarnations."""
        self.unserved = 0
        """Engines that were lost before they served: nothing was interrupted."""
        self._trainers: list[Interruption] = []
        """Losses of it that were made good last."""

    def __call__(self, event: Event) -> None:
        kind, t, data = event["kind"], event["t"], event["data"]
        if kind == "engine_joined":
            self._engines.add(event["engine"])
            self._served.add(event["engine"])
        if kind in BACK:
            self._back(BACK[kind], t)
            if kind == "trainer_restarted" and data["steps"]:
                for one in self._trainers:
                    one.lost = f"{data['steps']} steps were repeated from the last checkpoint"
        elif kind == "resumed":
            # whoever was awaited before it is not awaited any more: all roles were started anew
            for waiting in self._open.values():
                waiting.clear()
            self._engines.clear()
            lost = f"{data['lost']} events were taken back and done again" if data["lost"] else ""
            since = f"resumed after step {event['step']}" if event.get("step") else "resumed from the beginning"
            self._add(Interruption(role="run", t=t, who=f"the run was {since}", why="", lost=lost))
        elif kind == "trainer_lost":
            why = str(data["failure"])
            self._add(Interruption(role="trainer", t=t, who="the trainer was lost", why=why, lost=""))
        elif kind == "engine_lost" and event["engine"] in self._engines:
            lost = f"{data['lost_tokens']} tokens lost" if data["lost_tokens"] else ""
            who = f"{event['engine']} was lost"
            self._add(Interruption(role="engine", t=t, who=who, why=str(data["failure"]), lost=lost))
        elif kind == "engine_lost":
            self.unserved += event["engine"] not in self._served and data["failure"] != RUN_ENDED
        elif kind == "host_lost":
            who = f"{event['host']} was lost"
            self._add(Interruption(role="host", t=t, who=who, why=str(data["failure"]), lost=""))

    def _add(self, one: Interruption) -> None:
        self.found.append(one)
        self._open[one.role].append(one)

    def _back(self, role: str, t: float) -> None:
        """Something of this role is there again: the oldest loss is made good, of the run and the trainer all are."""
        waiting = self._open[role]
        ended = waiting[:1] if role in ("engine", "host") else list(waiting)
        for one in ended:
            waiting.remove(one)
            one.recover_s = t - one.t
        if role == "trainer" and ended:
            self._trainers = ended

    def result(self) -> dict[str, Any]:
        """Per role that was interrupted: how often, how often it recovered, and in how many seconds."""
        found: dict[str, Any] = {}
        for role in ROLES:
            mine = [one for one in self.found if one.role == role]
            times = Stat()
            for one in mine:
                times.add(one.recover_s)
            if mine or (role == "engine" and self.unserved):
                found[role] = {
                    "count": len(mine),
                    "recovered": times.n,
                    "recover_s": {"mean": times.mean, "max": times.max},
                }
        if self.unserved:
            found["engine"]["unserved"] = self.unserved
        return found


def told(found: Mapping[str, Any]) -> Iterable[str]:
    """The summary's field in plain words, a part per role."""
    names = {"run": "resumed", "trainer": "trainer lost", "engine": "engines lost", "host": "env hosts lost"}
    for role, row in found.items():
        worst = row["recover_s"]["max"]
        back = "" if worst is None else f" (went on within {worst:.1f} s)"
        left = row["count"] - row["recovered"]
        unserved = row.get("unserved", 0)
        yield (
            f"{names[role]} {row['count']} x{back}"
            + (f", {left} not recovered" if left else "")
            + (f", {unserved} more that never served" if unserved else "")
        )
