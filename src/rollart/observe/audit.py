"""The promises of the design, checked on a run's record: what was broken, a line each; nothing when all hold.

Everything here is a pure function of the events (of all incarnations, as they were written), with what other parts of a
world remember as second witnesses where they can be had: the trainer's own record, the trajectories that were kept, the
order of a task's instances. A line begins with the promise's name, so that the same breakage in two runs is told by it.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rollart.observe.audit_record import Record, bound_of
from rollart.observe.audit_versions import VERSION_PROMISES, continued
from rollart.sched.mixing import Mix
from rollart.sched.staleness import NO_BOUND, Lineage

Attempt = tuple[str, int]
ENDINGS = ("done", "failed", "cancelled")


def audit(record: Record) -> list[str]:
    """Every broken promise, a line each: `promise: what, naming the ids`."""
    if not record.of("run_started"):
        return ["record: the run has no run_started"]
    return [line for promise in PROMISES for line in promise(record)]


# --- the record itself ---------------------------------------------------------------------------------------------------


def numbered(record: Record) -> Iterator[str]:
    """Sequence numbers have no gap, time never falls, and `resumed` says truly how much it takes back."""
    kept: list[Mapping[str, Any]] = []
    for row in record.written:
        seq = row["seq"]
        if row["kind"] == "resumed":
            if seq != row["from_seq"] + 1 or row["from_seq"] > len(kept):
                yield f"record: event {seq} is resumed from {row['from_seq']}, of {len(kept)} that stand"
            if row["lost"] != len(kept) - row["from_seq"]:
                yield f"record: event {seq} says {row['lost']} lost, {len(kept) - row['from_seq']} stood after it"
            del kept[row["from_seq"] :]
        elif seq != len(kept) + 1:
            yield f"record: event {seq} ({row['kind']}) follows event {len(kept)}"
        if kept and row["t"] < kept[-1]["t"]:
            yield f"record: event {seq} ({row['kind']}) at {row['t']} s comes after {kept[-1]['t']} s"
        kept.append(row)


def ended(record: Record) -> Iterator[str]:
    """A run begins once and ends once, with a status and a reason."""
    ends = record.of("run_finished")
    if len(record.of("run_started")) != 1:
        yield f"ended: {len(record.of('run_started'))} run_started in the surviving log"
    if len(ends) != 1 or record.rows[-1] is not ends[-1]:
        yield f"ended: {len(ends)} run_finished in the surviving log, the last event is {record.rows[-1]['kind']}"
    elif ends[0]["status"] not in ENDINGS or not ends[0]["why"]:
        yield f"ended: status {ends[0]['status']!r} because of {ends[0]['why']!r}"


# --- attempts and groups -------------------------------------------------------------------------------------------------


def attempts_end_once(record: Record) -> Iterator[str]:
    """Each attempt begins once and ends in one terminal state; attempts of a member follow each other without a gap."""
    life: dict[Attempt, str] = {}
    last: dict[str, int] = {}
    for row in record.rows:
        kind = row["kind"]
        if kind == "traj_started":
            traj, attempt = row["traj"], row["attempt"]
            if (traj, attempt) in life:
                yield f"attempts: {traj}#{attempt} was started twice"
            if attempt != last.get(traj, -1) + 1:
                yield f"attempts: {traj}#{attempt} follows #{last.get(traj, -1)}"
            elif attempt and life[traj, attempt - 1] == "lives":
                yield f"attempts: {traj}#{attempt} was started while #{attempt - 1} lived"
            life[traj, attempt] = "lives"
            last[traj] = attempt
        elif kind == "traj_finished":
            key = row["traj"], row["attempt"]
            if life.get(key) != "lives":
                yield f"attempts: {key[0]}#{key[1]} ended as {row['status']}; before it {life.get(key, 'never began')}"
            life[key] = row["status"]
    for (traj, attempt), state in life.items() if record.done else ():
        if state == "lives":
            yield f"attempts: {traj}#{attempt} never ended"


def rewards_are_earned(record: Record) -> Iterator[str]:
    """Only what is done has a reward, a finite number; a failure says what failed."""
    for row in record.of("traj_finished"):
        name = f"{row['traj']}#{row['attempt']}"
        if row["status"] == "done" and not (row["reward"] is not None and math.isfinite(row["reward"])):
            yield f"rewards: {name} is done with reward {row['reward']}"
        if row["status"] != "done" and row["reward"] is not None:
            yield f"rewards: {name} {row['status']} ({row['cause']}) with reward {row['reward']}"
        if (row["status"] == "failed") != ("failure" in row):
            yield f"rewards: {name} {row['status']} with failure {row.get('failure')!r}"


_MOVES: Mapping[str, tuple[tuple[str, ...], str]] = {
    "group_opened": (("never opened",), "open"),
    "group_completed": (("open",), "buffered"),
    "group_dropped": (("open", "buffered"), "dropped"),
    "batch_released": (("buffered",), "trained"),
}
"""Event -> the states in which a group may be when it comes, and the one in which it is then."""


def groups_end_once(record: Record) -> Iterator[str]:
    """Each group is trained or dropped, once; nothing is tried again for a group that is over."""
    state: dict[str, str] = {}
    rolled_back: set[str] = set()
    for row in record.rows:
        move = _MOVES.get(row["kind"])
        for group in () if move is None else row.get("groups") or (row["group"],):
            assert move is not None
            if state.get(group, "never opened") not in move[0]:
                yield f"groups: {group}: {row['kind']} when it was {state.get(group, 'never opened')}"
            state[group] = move[1]
        if row["kind"] == "traj_finished" and row["cause"] == "rolled_back":
            rolled_back.add(row["traj"])
        elif row["kind"] == "traj_started" and row["purpose"] == "train":
            now = state.get(row["group"], "never opened")
            again = row["attempt"] > 0 and row["traj"] not in rolled_back  # a resume issues it before it can be dropped
            if now != "open" and (again or now == "never opened"):
                yield f"groups: {row['traj']}#{row['attempt']} began, its group is {now}"
            rolled_back.discard(row["traj"])
    for group, last in state.items() if record.done else ():
        if last in ("open", "buffered"):
            yield f"groups: {group} was {last} when the run was done"


def members_make_groups(record: Record) -> Iterator[str]:
    """What a batch says that it holds is what its groups' members are; no group has too few or too many."""
    size = record.started["group_size"]
    for batch in record.of("batch_released"):
        of_batch = [row for group in batch["groups"] for row in record.members.get(group, ())]
        tokens = sum(row["sampled"] for row in of_batch)
        if (batch["trajectories"], batch["tokens"]) != (len(of_batch), tokens):
            said = f"{batch['trajectories']} trajectories of {batch['tokens']} tokens"
            yield f"members: step {batch['step']} holds {said}, its members are {len(of_batch)} of {tokens}"
        for group in batch["groups"]:
            n = len({row["traj"] for row in record.members.get(group, ())})
            if not min(record.min_members, size) <= n <= size or n != len(record.members.get(group, ())):
                yield f"members: {group} was trained with {n} members of {size}"


# --- tokens --------------------------------------------------------------------------------------------------------------


def tokens_once(record: Record) -> Iterator[str]:
    """The turns of an attempt are its tokens, in the log and in what was kept."""
    sampled: Counter[Attempt] = Counter()
    for row in record.of("turn_done"):
        sampled[row["traj"], row["attempt"]] += row["sampled"]
        if row["sampled"] != sum(n for _, n in row["spans"]):
            yield f"tokens: a turn of {row['traj']}#{row['attempt']} has {row['sampled']} in spans {row['spans']}"
    said: dict[Attempt, int] = {}
    for row in record.of("traj_finished"):
        key = row["traj"], row["attempt"]
        said[key] = row["sampled"]
        if row["sampled"] != sampled[key]:
            yield f"tokens: {key[0]}#{key[1]} ended with {row['sampled']}, its turns had {sampled[key]}"
    kept = {(trajectory.id, trajectory.attempt): trajectory for trajectory in record.kept}
    for (traj, attempt), trajectory in kept.items():
        if said.get((traj, attempt), trajectory.n_sampled) != trajectory.n_sampled:
            yield f"tokens: {traj}#{attempt} was kept with {trajectory.n_sampled}, the log says {said[traj, attempt]}"


def ledger_closes(record: Record) -> Iterator[str]:
    """Both books close at each balance; the last one agrees with turns, batches and losses in the log."""
    before: Mapping[str, int] = {}
    for row in record.of("ledger"):
        places = row["trained"] + sum(row["dropped"].values()) + row["buffered"] + row["in_flight"] + row["eval"]
        if not row["sampled"] == places == sum(row["engines"].values()):
            engines = sum(row["engines"].values())
            yield f"ledger: event {row['seq']}: sampled {row['sampled']}, places {places}, engines {engines}"
        less = [engine for engine, n in before.items() if row["engines"].get(engine, 0) < n]
        if less:
            yield f"ledger: event {row['seq']}: {', '.join(less)} sampled less than before"
        before = row["engines"]
    if not record.done:
        return
    if not record.of("ledger"):
        yield "ledger: the run has no balance"
        return
    last = record.of("ledger")[-1]
    lost = sum(row["lost_tokens"] for row in record.of("engine_lost"))
    dropped = sum(row["tokens"] for row in record.of("tokens_dropped"))
    turns = sum(row["sampled"] for row in record.of("turn_done"))
    of_eval = sum(row["sampled"] for row in record.of("traj_finished") if row["purpose"] == "eval")
    trained = sum(batch["tokens"] for batch in record.of("batch_released"))
    for name, says, is_ in (
        ("sampled", last["sampled"], turns + lost + dropped),
        ("trained and masked", last["trained"] + last["dropped"].get("masked", 0), trained),
        ("eval", last["eval"], of_eval),
        ("buffered and in flight", last["buffered"] + last["in_flight"], 0),
    ):
        if says != is_:
            yield f"ledger: at the end {name} {says}, the log has {is_}"


# --- what is trained -----------------------------------------------------------------------------------------------------


def batches_in_order(record: Record) -> Iterator[str]:
    """Steps come one by one, each with its tasks' quota, so that the mix is kept over any window of steps."""
    started = record.started
    mix = Mix(started["mix"], started["batch"] // started["group_size"])
    task_of = {row["group"]: row["task"] for row in record.of("group_opened")}
    batches = record.of("batch_released")
    wanted = [started["steps"], *(row["steps"] for row in record.of("resumed") if "steps" in row)][-1]
    if record.done and len(batches) != wanted:
        yield f"mix: {len(batches)} batches were released, {wanted} were wanted"
    counts: Counter[str] = Counter()
    slack = 1.0 if len(started["mix"]) <= 2 else len(started["mix"]) - 1.0
    for step, batch in enumerate(batches):
        if batch["step"] != step:
            yield f"mix: step {batch['step']} was released where step {step} was due"
        quota = {task: n for task, n in mix.quota(step).items() if n}
        has = Counter(task_of.get(group, "?") for group in batch["groups"])
        if has != quota:
            yield f"mix: step {step} has {dict(has)}, its quota is {quota}"
        counts += has
        for task, share in started["mix"].items():
            if abs(counts[task] - share * counts.total()) > slack + 1e-9:
                yield f"mix: {counts[task]} of {counts.total()} groups up to step {step} are of {task}, share {share}"


def staleness_bounded(record: Record) -> Iterator[str]:
    """Nothing is trained on tokens that are too old, counted in batches and not in numbers."""
    lineage, served = Lineage(), -1
    bound = bound_of(record.started)
    for row in record.rows:
        if row["kind"] == "published":
            lineage = continued(lineage, row)
            served = row["version"]
        elif row["kind"] == "resumed":
            bound = bound if bound == NO_BOUND else row.get("max_staleness", bound)
        elif row["kind"] == "batch_released":
            at = lineage.batches(row["version"])
            if row["version"] != served or at != row["step"]:
                yield f"staleness: step {row['step']} was released at version {row['version']}, published is {served}"
            oldest = [
                member["oldest_version"]
                for group in row["groups"]
                for member in record.members.get(group, ())
                if member["oldest_version"] is not None
            ]
            lag = max((at - lineage.batches(version) for version in oldest), default=0)
            if not lag == row["staleness_max"] <= bound:
                yield f"staleness: step {row['step']} has {lag} and says {row['staleness_max']}, the bound is {bound}"


def instances_in_order(record: Record) -> Iterator[str]:
    """What was issued of a task is a prefix of its order: nothing skipped, nothing issued again."""
    if record.order is None:
        return
    issued: dict[str, list[str]] = defaultdict(list)
    for row in record.of("group_opened"):
        issued[row["task"]].append(row["group"])
    for task, groups in issued.items():
        epoch, due = 0, list[str]()
        while len(due) < len(groups):
            due += [f"train/{task}/{epoch}/{index}" for index in record.order(task, epoch)]
            epoch += 1
        wrong = next(((n, a, b) for n, (a, b) in enumerate(zip(groups, due, strict=False)) if a != b), None)
        if wrong is not None:
            yield f"instances: number {wrong[0]} of {task} is {wrong[1]}, {wrong[2]} was due"


def learned_once(record: Record) -> Iterator[str]:
    """The trainer's own record: each optimiser step holds members of its batch, each member is in one step."""
    if record.learned is None or not record.done:
        return
    trained = [
        {row["traj"] for group in batch["groups"] for row in record.members.get(group, ())}
        for batch in record.of("batch_released")
    ]
    parts = len(record.learned) / max(1, len(trained))
    if parts != int(parts):
        yield f"learned: the trainer made {len(record.learned)} steps of {len(trained)} batches"
        return
    for step, members in enumerate(trained):
        has = Counter(traj for part in record.learned[step * int(parts) : (step + 1) * int(parts)] for traj in part)
        if has != Counter(members):
            twice = sorted(traj for traj, n in has.items() if n > 1)
            missing, foreign = sorted(members - has.keys()), sorted(has.keys() - members)
            yield f"learned: step {step}: twice {twice}, never {missing}, not of its batch {foreign}"


PROMISES: tuple[Callable[[Record], Iterator[str]], ...] = (
    numbered,
    ended,
    attempts_end_once,
    rewards_are_earned,
    groups_end_once,
    members_make_groups,
    tokens_once,
    ledger_closes,
    batches_in_order,
    staleness_bounded,
    instances_in_order,
    learned_once,
    *VERSION_PROMISES,
)
