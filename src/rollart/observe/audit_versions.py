"""The promises about versions: they only rise, are never used again, and nothing is sampled under one that may not be.

Checked on all that was written, not on the surviving history alone: engines of an incarnation that was taken back have
served versions too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator

from rollart.observe.audit_record import Record, Row, bound_of
from rollart.sched.staleness import NO_BOUND, Lineage


def versions_rise(record: Record) -> Iterator[str]:
    """Published numbers rise over all incarnations; what is published again is the same weights."""
    last = -1
    for row in record.written:
        if row["kind"] == "published":
            if row["version"] <= last:
                yield f"versions: {row['version']} was published after {last}"
            last = max(last, row["version"])
    digests: dict[int, str] = {}
    for row in record.of("published"):
        digests[row["version"]] = row["digest"]
        if "again" in row and digests.get(row["again"]) != row["digest"]:
            old = digests.get(row["again"])
            yield f"versions: {row['version']} is {row['digest']}, it should be {row['again']} again, which was {old}"


def engines_serve_what_was_published(record: Record) -> Iterator[str]:
    """Versions rise on each engine, an apply serves the published weights, an engine's id is its own."""
    digests: dict[int, str] = {}
    served: dict[str, int] = {}
    wrong: dict[str, int] = {}
    joined: set[str] = set()
    for row in record.written:
        kind = row["kind"]
        if kind == "published":
            digests[row["version"]] = row["digest"]
        elif kind == "applied":
            engine, version = row["engine"], row["version"]
            if version <= served.get(engine, -1):
                yield f"versions: {engine} applied {version} after {served[engine]}"
            served[engine] = version
            if row["matches"] != (digests.get(version) == row["digest"]):
                yield f"versions: {engine} serves {row['digest']} as {version}, published was {digests.get(version)}"
            if not row["matches"]:
                wrong[engine] = row["seq"]
        elif kind == "engine_joined":
            if row["engine"] in joined:
                yield f"versions: {row['engine']} joined twice"
            joined.add(row["engine"])
        elif kind == "turn_done" and row["engine"] in wrong and row["sampled"]:
            yield f"versions: {row['engine']} served wrong weights, and a turn of {row['traj']} has tokens of it"


def versions_never_fall(record: Record) -> Iterator[str]:
    """Inside an attempt versions never fall, and each is one that its engine had applied."""
    applied: dict[str, set[int]] = defaultdict(set)
    last: dict[tuple[str, int], int] = {}
    for row in record.written:
        kind = row["kind"]
        if kind == "applied":
            applied[row["engine"]].add(row["version"])
        elif kind == "traj_started":
            last.pop((row["traj"], row["attempt"]), None)  # of a history that was taken back
        elif kind == "turn_done":
            key = row["traj"], row["attempt"]
            for version, _ in row["spans"]:
                if version < last.get(key, 0):
                    yield f"versions: {key[0]}#{key[1]} sampled under {version} after {last[key]}"
                last[key] = version
                if version not in applied[row["engine"]]:
                    yield f"versions: {key[0]}#{key[1]} sampled under {version}, {row['engine']} never applied it"
    for trajectory in record.kept:
        versions = [span.version for span in trajectory.spans]
        if versions != sorted(versions):
            yield f"versions: {trajectory.id}#{trajectory.attempt} was kept with versions {versions}"


def evaluations_are_pinned(record: Record) -> Iterator[str]:
    """An episode of an evaluation is sampled under one version."""
    for row in record.of("traj_finished"):
        if row["purpose"] == "eval" and row["oldest_version"] != row["newest_version"]:
            versions = f"{row['oldest_version']} to {row['newest_version']}"
            yield f"evaluations: {row['traj']}#{row['attempt']} was sampled under versions {versions}"


def routes_are_useful(record: Record) -> Iterator[str]:
    """No turn goes to an engine whose tokens could not be trained any more, or are older than those that it goes on from."""
    lineage, bound = Lineage(), bound_of(record.started)
    served: dict[str, int] = {}
    newest: dict[tuple[str, int], int] = {}
    training: set[tuple[str, int]] = set()
    needed = 0
    for row in record.rows:
        kind = row["kind"]
        if kind == "published":
            lineage = continued(lineage, row)
        elif kind == "resumed":
            bound = bound if bound == NO_BOUND else row.get("max_staleness", bound)
        elif kind == "applied":
            served[row["engine"]] = row["version"]
        elif kind == "batch_released":
            needed = lineage.batches(row["version"]) + 1 - bound
        elif kind == "traj_started" and row["purpose"] == "train":
            training.add((row["traj"], row["attempt"]))
        elif kind == "turn_done" and row["spans"]:
            newest[row["traj"], row["attempt"]] = row["spans"][-1][0]
        elif kind == "turn_routed" and (attempt := (row["traj"], row["attempt"])) in training:
            version = served.get(row["engine"], -1)
            if version < newest.get(attempt, 0) or lineage.batches(version) < needed:
                yield (
                    f"routes: {attempt[0]}#{attempt[1]} goes to {row['engine']} at version {version}; it has tokens of "
                    f"{newest.get(attempt)}, and {needed} batches are needed behind what is trained next"
                )


def continued(lineage: Lineage, published: Row) -> Lineage:
    """The lineage after a publish. A run that begins anew publishes its first weights above all earlier numbers."""
    if "again" in published:
        return lineage.again(published["again"], published["version"])
    begins = published["step"] < 0 and not lineage.jumps and published["version"] > 0
    return lineage.again(0, published["version"]) if begins else lineage


VERSION_PROMISES: tuple[Callable[[Record], Iterator[str]], ...] = (
    versions_rise,
    engines_serve_what_was_published,
    versions_never_fall,
    evaluations_are_pinned,
    routes_are_useful,
)
