"""What happens to a virtual world by itself: lost workers, failed transfers, outages, and how long replacements take.

Owns when something fails and when another can stand in its place; what follows from it is control's business, by the way that
real losses take. Invariants: each fault that happens is in the log, in the instant in which it happens; a worker is lost once;
nothing starts on a node that is away; a replacement of a worker is up `start_s` after its node is there, and the workers that a
run begins with at once.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Literal

from rollart.config.faults import FaultsConfig, LostEngines, LostHosts, LostNode, LostRewards, LostTrainer, LostWeights
from rollart.core.errors import failure
from rollart.core.events import Recorder
from rollart.core.resources import Lease
from rollart.core.seeds import unit
from rollart.core.types import Failure, Role
from rollart.sim.fault_draws import Outages, Span, life_s
from rollart.sim.slots import Slots, node_of

What = Literal["engine", "node", "env_host", "trainer", "weights", "rewards"]
_WORKERS: Mapping[Role, What] = {
    "mixed": "engine", "decode": "engine", "prefill": "engine", "env": "env_host", "train": "trainer"
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """One that lives."""

    what: What
    name: str
    lease: Lease
    lose: Callable[[str], None]
    """Loses it, for that reason."""


class Faults:
    """For one run. `nodes`: pool -> its nodes, of pools whose nodes count; `home`: those of them that the trainer is on;
    `first`: role -> workers that a run begins with; `forget`: told of a node that is lost."""

    def __init__(
        self, config: FaultsConfig, *, seed: int, nodes: Mapping[str, int], home: Collection[str],
        first: Mapping[Role, int], slots: Slots, forget: Callable[[str], None] = lambda node: None,
    ) -> None:  # fmt: skip
        self._config = config
        self._seed = seed
        self._nodes = nodes
        self._home = home
        self._first = first
        self._slots = slots
        self._forget = forget
        self._record: Recorder | None = None
        """None: the run has not begun, or is over."""
        self._workers: dict[str, Worker] = {}
        """Lease -> who lives on it, in the order in which they started."""
        self._stood: dict[tuple[What, str], int] = {}
        """Place -> how many have stood there."""
        self._back_s: dict[str, float] = {}
        """Node -> when it is there again."""
        self._happened: set[str] = set()
        """Scripted faults that have."""
        script = config.script.items()
        self._spoiled = [(name, _span(one)) for name, one in script if isinstance(one, LostWeights)]
        self.outages = Outages(config.rewards, seed, [_span(one) for _, one in script if isinstance(one, LostRewards)])

    @asynccontextmanager
    async def beside(self, record: Recorder) -> AsyncIterator[None]:
        """Inside, things fail. At the end the log says which scripted faults found nothing to hit."""
        self._record = record
        self._arm()
        try:
            yield
        finally:
            self._record = None
        over_s = asyncio.get_running_loop().time()
        for name, one in self._config.script.items():
            if name not in self._happened:
                why = f"the run was over at {over_s:.0f} s" if one.at_s >= over_s else "it found nothing to hit"
                text = f"cluster.faults.script.{name} (at_s={one.at_s:g}) did not happen: {why}"
                record("advisory", code="fault_missed", text=text)

    def _arm(self) -> None:
        loop = asyncio.get_running_loop()
        for node in (f"{pool}/{number}" for pool, n in self._nodes.items() for number in range(n)):
            self._expect(node, 0)
        self._expect_outage(0)
        for name, one in self._config.script.items():
            if not isinstance(one, LostWeights):
                loop.call_at(one.at_s, self._scripted, name, one)

    # --- the world's side ----------------------------------------------------------------------------------------------

    async def up(self, lease: Lease, nth: int) -> Failure | None:
        """Wait until a worker of `lease`, of whose role `nth` were started before, is up; or why none ever will be."""
        what = _WORKERS.get(lease.role)
        if what is None or nth < self._first.get(lease.role, 0):
            return None
        start_s, replaced = self._replacement(what)
        if not replaced:
            return failure("cluster", "no_room", f"cluster.faults.{what}.replaced=false", retryable=False)
        loop, nodes = asyncio.get_running_loop(), self._nodes_of(what, lease)
        while True:
            begun_s = max([loop.time(), *(self._back_s.get(node, 0.0) for node in nodes)])
            if math.isinf(begun_s):
                return failure("cluster", "no_room", "its node is lost (cluster.faults.node.replaced=false)")
            await asyncio.sleep(begun_s + start_s - loop.time())
            if all(self._back_s.get(node, 0.0) <= begun_s for node in nodes):
                return None

    def started(self, lease: Lease, name: str, lose: Callable[[str], None]) -> None:
        """A worker lives from now on; it is known how long."""
        what = _WORKERS.get(lease.role)
        if what is None:
            return
        self._workers[lease.id] = Worker(what=what, name=name, lease=lease, lose=lose)
        place = name if what == "env_host" else lease.devices[0]
        nth = self._stood[what, place] = self._stood.get((what, place), -1) + 1
        life = life_s(self._mtbf_s(what), self._seed, what, place, nth)
        if math.isfinite(life):
            asyncio.get_running_loop().call_later(life, self._die, lease.id)

    def ended(self, lease: str) -> None:
        """Nobody lives on that lease any more."""
        self._workers.pop(lease, None)

    def spoils(self, node: str, nth: int) -> bool:
        """Whether the pull that ends now on `node`, its `nth`, fails."""
        now_s = asyncio.get_running_loop().time()
        scripted = next((name for name, span in self._spoiled if span.holds(now_s)), "")
        share = self._config.weights.failed_share
        if not scripted and not (share and unit(self._seed, "fault", "weights", node, nth) < share):
            return False
        self._say("weights", node, script=scripted)
        return True

    # --- what happens --------------------------------------------------------------------------------------------------

    def _say(self, what: What, subject: str, *, script: str = "", **more: object) -> None:
        if script:
            self._happened.add(script)
            more = {"script": script, **more}
        if self._record is not None:
            self._record("fault", what=what, subject=subject, **more)

    def _die(self, lease: str, *, script: str = "") -> None:
        worker = self._workers.pop(lease, None)
        if worker is not None and self._record is not None:
            self._say(worker.what, worker.name, script=script)
            worker.lose("process died")

    def _expect(self, node: str, nth: int) -> None:
        """The node's next end, from now on."""
        life = life_s(self._config.node.mtbf_s, self._seed, "node", node, nth)
        if math.isfinite(life):
            asyncio.get_running_loop().call_later(life, self._fail, node, nth)

    def _fail(self, node: str, nth: int) -> None:
        self._lose_node(node)
        back_s = self._back_s.get(node, 0.0)  # a scripted loss may have been first
        if math.isfinite(back_s) and self._record is not None:
            asyncio.get_running_loop().call_at(back_s, self._expect, node, nth + 1)

    def _lose_node(self, node: str, *, script: str = "") -> None:
        """All that runs on it dies, and nothing starts there until it is back."""
        loop, law = asyncio.get_running_loop(), self._config.node
        if self._back_s.get(node, 0.0) > loop.time() or self._record is None:
            return
        self._back_s[node] = loop.time() + law.replace_s if law.replaced else math.inf
        self._slots.out.add(node)
        if law.replaced:
            loop.call_later(law.replace_s, self._slots.out.discard, node)
        self._forget(node)
        hit = [worker for worker in self._workers.values() if node in self._nodes_of(worker.what, worker.lease)]
        self._say("node", node, script=script, workers=[worker.name for worker in hit])
        for worker in hit:
            self._workers.pop(worker.lease.id, None)
            worker.lose(f"node {node} was lost")

    def _expect_outage(self, nth: int) -> None:
        begin_s = self.outages.drawn(nth).begin_s
        if math.isfinite(begin_s):
            asyncio.get_running_loop().call_at(begin_s, self._away, nth)

    def _away(self, nth: int) -> None:
        self._say("rewards", "rewards", lasts_s=self._config.rewards.outage_s)
        if self._record is not None:
            self._expect_outage(nth + 1)

    def _scripted(self, name: str, one: LostEngines | LostNode | LostHosts | LostTrainer | LostRewards) -> None:
        match one:
            case LostNode():
                self._lose_node(f"{one.pool}/{one.number}", script=name)
            case LostRewards():
                self._say("rewards", "rewards", script=name, lasts_s=one.lasts_s)
            case LostEngines():
                self._die_first(name, one.count, lambda at: at.what == "engine" and one.pool in ("", at.lease.pool))
            case LostHosts():
                self._die_first(name, one.count, lambda at: at.what == "env_host")
            case LostTrainer():
                self._die_first(name, 1, lambda at: at.what == "trainer")

    def _die_first(self, name: str, count: int, is_one: Callable[[Worker], bool]) -> None:
        leases = [lease for lease, worker in self._workers.items() if is_one(worker)]
        for lease in leases[:count]:
            self._die(lease, script=name)

    # --- what the configuration says -----------------------------------------------------------------------------------

    def _mtbf_s(self, what: What) -> float:
        own = self._config
        return {
            "engine": own.engine.mtbf_s, "env_host": own.env_host.mtbf_s, "trainer": own.trainer.mtbf_s
        }[what]  # fmt: skip

    def _replacement(self, what: What) -> tuple[float, bool]:
        """Seconds until another is up, and whether there is one at all."""
        own = self._config
        match what:
            case "engine":
                return own.engine.start_s, own.engine.replaced
            case "env_host":
                return own.env_host.start_s, own.env_host.replaced
            case _:
                return own.trainer.start_s, True

    def _nodes_of(self, what: What, lease: Lease) -> Iterable[str]:
        """Nodes that it cannot do without."""
        if what == "trainer":
            return tuple(f"{pool}/{number}" for pool in self._home for number in range(self._nodes[pool]))
        return dict.fromkeys(node_of(device) for device in lease.devices) if what == "engine" else ()


def _span(one: LostWeights | LostRewards) -> Span:
    return Span(one.at_s, one.at_s + one.lasts_s)
