"""Faults that cannot be are refused before the first event, with what can; those that can are named in what figures rest on."""

from __future__ import annotations

from typing import Any

import pytest

from rollart.config.faults import NO_FAULTS
from rollart.config.real import real_problems
from rollart.config.schema import RunConfig
from rollart.core.errors import ConfigError
from rollart.sim.virtual import build
from virtual_configs import POOLS, a_virtual

IN_TURN = {"all": {"device": "H800", "roles": ["train", "mixed"]}}


def faulty(faults: dict[str, Any], **sections: Any) -> RunConfig:
    return a_virtual(cluster={"faults": faults}, **{"load": "math", **sections})


def script(**one: Any) -> dict[str, Any]:
    return {"script": {"mine": {"at_s": 60, **one}}}


@pytest.mark.parametrize(
    ("faults", "sections", "said"),
    [
        (script(kind="engine", pool="rol"), {}, "pool=rol has no engines; did you mean roll?"),
        (script(kind="engine", pool="train"), {}, "pool=train has no engines"),
        (script(kind="engine", pool="roll", count=9), {}, "there are 8 engines in pool roll; use count=8 or fewer"),
        (script(kind="engine", count=9), {}, "there are 8 engines; use count=8"),
        (script(kind="node", pool="rolls"), {}, "did you mean roll?"),
        (script(kind="node", pool="roll", number=1), {}, "counted from 0 to 0; use number=0"),
        (script(kind="env_host", count=2), {}, "there are 1 hosts (envs.hosts); use count=1"),
        (script(kind="rewards", lasts_s=5), {"load": "frozen_lake"}, "no task is scored"),
        ({"rewards": {"mtbf_s": 100}}, {"load": "frozen_lake"}, "use cluster.faults.rewards.mtbf_s=0"),
        (
            {"weights": {"failed_share": 0.1}}, {"pools": IN_TURN, "schedule": {"max_staleness": 0}},
            "use cluster.faults.weights.failed_share=0",
        ),
        (
            script(kind="weights", lasts_s=5), {"pools": IN_TURN, "schedule": {"max_staleness": 0}}, "no weights are pulled",
        ),
        ({"trainer": {"mtbf_s": 9}}, {"checkpoint": {"every": 0}}, "use checkpoint.every=1 or more"),
        ({"node": {"mtbf_s": 9}}, {"checkpoint": {"every": 0}}, "use checkpoint.every=1 or more"),
        (script(kind="node", pool="train"), {"checkpoint": {"every": 0}}, "use checkpoint.every=1 or more"),
        ({"engine": {"mtbf_s": 9, "start_s": 300}}, {}, "use deadlines.start_s=301 or more"),
        ({"node": {"mtbf_s": 9, "replace_s": 600}}, {}, "node.replace_s, 660 s; use deadlines.start_s=661"),
        ({"env_host": {"mtbf_s": 9, "start_s": 500}}, {}, "use deadlines.start_s=501 or more"),
        ({"trainer": {"mtbf_s": 9, "disk_gbyte_per_s": 0.01}}, {}, "loading a checkpoint of 115 GB"),
        ({"node": {"mtbf_s": 9, "replace_s": 120}}, {}, "node.replace_s, 180 s; use deadlines.start_s=181"),
        ({"weights": {"failed_share": 0.1}}, {"deadlines": {"start_s": 30}}, "use deadlines.start_s=61 or more"),
        ({"rewards": {"mtbf_s": 1e-9, "outage_s": 1e-9}}, {}, "use cluster.faults.rewards.mtbf_s=1 or more, or 0"),
        ({"node": {"mtbf_s": 0.01, "replace_s": 0}}, {}, "use cluster.faults.node.mtbf_s=1 or more"),
        ({"engine": {"mtbf_s": 0.9}}, {}, "use cluster.faults.engine.mtbf_s=1 or more"),
        ({"env_host": {"mtbf_s": 0.9}}, {}, "use cluster.faults.env_host.mtbf_s=1 or more"),
        ({"trainer": {"mtbf_s": 0.9}}, {}, "use cluster.faults.trainer.mtbf_s=1 or more"),
    ],
)  # fmt: skip
def test_a_fault_that_cannot_be_is_refused_with_what_can(faults: dict[str, Any], sections: Any, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        build(faulty(faults, **sections))
    assert said in str(refused.value)
    assert "cluster.faults" in str(refused.value)


@pytest.mark.parametrize(
    "faults",
    [
        {"rewards": {"mtbf_s": 900}}, {"env_host": {"mtbf_s": 900}}, {"engine": {"mtbf_s": 900, "replaced": False}},
        script(kind="rewards", lasts_s=5),
    ],
)  # fmt: skip
def test_replacements_that_nothing_calls_for_are_not_held_against_the_deadlines(faults: dict[str, Any]) -> None:
    assert build(faulty(faults, deadlines={"start_s": 30})).faults is not None


def test_everything_that_cannot_be_is_said_at_once() -> None:
    faults = {**script(kind="engine", count=99), "rewards": {"mtbf_s": 9}, "env_host": {"mtbf_s": 9, "start_s": 500}}
    with pytest.raises(ConfigError) as refused:
        build(faulty(faults, load="frozen_lake"))
    assert len(str(refused.value).splitlines()) == 3


@pytest.mark.parametrize(
    "bad", [{"engine": {"mtbf_s": -1}}, {"weights": {"failed_share": 1.0}}, script(kind="engine", at_s=0)]
)
def test_a_number_out_of_range_is_refused_when_the_configuration_is_read(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"greater|less"):
        faulty(bad)


def test_each_law_is_named_in_what_the_figures_rest_on() -> None:
    faults = {
        "engine": {"mtbf_s": 21600}, "node": {"mtbf_s": 864000, "replaced": False}, "env_host": {"mtbf_s": 7200},
        "trainer": {"mtbf_s": 43200}, "weights": {"failed_share": 0.01}, "rewards": {"mtbf_s": 900},
        **script(kind="trainer"),
    }  # fmt: skip
    plain, made = build(faulty({})).basis, build(faulty(faults)).basis
    assert made[: len(plain)] == plain
    said = "\n".join(made[len(plain) :])
    for text in (
        "faults of engines: each fails every 6.0 h on average (exponential), so one of 8 every 2700 s; another is there after "
        "60 s (assumed) and the weights by cluster.link",
        "faults of nodes: each fails every 10.0 days on average (exponential), so one of 2 every 5.0 days; nobody takes",
        "faults of env hosts: each fails every 2.0 h", "faults of the trainer: it fails every 12.0 h",
        "checkpoints: every 10 steps 115 GB",
        "faults of weights: 1.00% of a node's pulls", "faults of rewards: the service is away for 60 s (assumed), 900 s",
        "GB/s for each of the trainer's nodes, assumed)", "scripted faults: mine (trainer at 60 s)",
    ):  # fmt: skip
        assert text in said


@pytest.mark.parametrize(
    ("faults", "told"),
    [
        (
            script(kind="engine"),
            ["a lost engine: another is there after 60 s (assumed) and the weights by cluster.link"],
        ),
        ({"engine": {"replaced": False}, **script(kind="engine")}, ["a lost engine: nobody takes its place"]),
        (
            {"weights": {"failed_share": 0.1}, "engine": {"start_s": 5}},
            ["a lost engine: another is there after 5 s and"],
        ),
        (script(kind="env_host"), ["a lost env host: another is there after 10 s (assumed)"]),
        (
            script(kind="trainer"),
            ["a lost trainer: another is there after 60 s (assumed)", "checkpoints: every 10 steps"],
        ),
        (
            script(kind="node", pool="train"),
            ["a lost node: another is there after 90 s (assumed)", "a lost trainer: another", "checkpoints: "],
        ),
        ({"node": {"mtbf_s": 1e9, "replace_s": 7}}, ["every 11574.1 days", "7 s", "a lost engine:", "a lost trainer:"]),
    ],
)
def test_replacements_are_named_wherever_they_may_be_needed(faults: dict[str, Any], told: list[str]) -> None:
    said = "\n".join(build(faulty(faults)).basis)
    assert [text for text in told if text not in said] == []


def test_scripted_faults_are_told_in_full_and_numbers_can_be_read() -> None:
    script = {
        "a": {"kind": "engine", "at_s": 5, "pool": "roll", "count": 2}, "b": {"kind": "node", "at_s": 6.5, "pool": "roll"},
        "c": {"kind": "rewards", "at_s": 7, "lasts_s": 60}, "d": {"kind": "engine", "at_s": 8},
    }  # fmt: skip
    faults = {"script": script, "engine": {"mtbf_s": 1e308}, "trainer": {"mtbf_s": 1e5}}
    said = "\n".join(build(faulty(faults, checkpoint={"every": 1})).basis)
    told = "a (engine at 5 s, pool=roll, count=2); b (node at 6.5 s, pool=roll, number=0); c (rewards at 7 s, lasts_s=60); "
    assert f"scripted faults: {told}d (engine at 8 s, count=1)" in said
    assert "faults of engines: each fails every 1.16e+303 days" in said
    assert "checkpoints: every step 115 GB" in said


def test_a_world_without_faults_has_none_of_their_parts() -> None:
    made = build(faulty({}))
    assert (made.faults, made.checkpoints, made.cluster.fate) == (None, None, None)
    assert made.world().beside is None
    assert build(faulty({"engine": {"mtbf_s": 9}})).checkpoints is None, "only a trainer that can be lost needs any"


def test_a_real_run_refuses_faults_and_says_who_injects_them() -> None:
    (line,) = [line for line in real_problems(faulty(script(kind="trainer"))) if "cluster.faults" in line]
    assert "rollart torture" in line
    assert "rollart simulate" in line
    assert not [line for line in real_problems(a_virtual(pools=POOLS)) if "cluster.faults" in line]
    assert a_virtual().cluster.faults == NO_FAULTS
