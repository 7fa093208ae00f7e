"""Workloads of a virtual world's tasks: by name or from a file of one's own, each task as it would be by itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollart.core.errors import ConfigError
from rollart.core.types import TrajId
from rollart.sim.loads import draws_of, environments, load_of, task_specs, usual_tokens
from rollart.sim.workload import Draws, workload
from virtual_configs import a_virtual

OWN = """
about: two turns
sources: {turns: [made up, inferred]}
turns: {law: constant, value: 2}
prompt_tokens: {law: constant, value: 100}
observation_tokens: {law: constant, value: 10}
response: {median: 20, sd_prompt: 0, sd_epoch: 0, sd_sampling: 0, cap: 64}
open_s: {law: constant, value: 1.5}
step_s: {law: constant, value: 0.5}
score_s: {law: constant, value: 0.0}
success: 0.5
"""


def test_a_file_of_ones_own_is_a_load(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(OWN, encoding="utf-8")
    load = load_of(str(path))
    assert load.turns.at(0.3) == 2
    assert usual_tokens(load) == 100 + 10 + 2 * 20
    config = a_virtual(load=str(path))
    assert task_specs(config, draws_of(config), max_context=4096)[0].scored is False


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (OWN.replace("median: 20", "median: -1"), "response.median: Input should be greater than 0"),
        (OWN.replace("value: 100", "value: .nan"), "prompt_tokens"),
        (OWN.replace("about: two turns", ""), "about: Field required"),
        ("a: [", "is no YAML"),
    ],
)
def test_a_file_that_is_wrong_says_where(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=says):
        load_of(str(path))


def test_unknown_loads_are_named_with_their_nearest() -> None:
    with pytest.raises(ConfigError, match="swe_bench"):
        load_of("swe_bnch")
    with pytest.raises(ConfigError, match=r"no_such.yaml' cannot be read: No such file or directory; give the path"):
        load_of("no_such.yaml")


def test_a_task_beside_others_does_what_it_does_alone() -> None:
    config = a_virtual()
    names = ("swe_bench", "gem_math")
    draws = {name: Draws(workload(name), config.seed) for name in names}
    both = environments(draws)
    for name in names:
        alone = draws[name].env()
        for index in range(20):
            traj = TrajId(f"train/{name}/0/{index}/1")
            assert both.turns(traj, 0) == alone.turns(traj, 0)
            assert both.reward(traj, 0) == alone.reward(traj, 0)
            assert both.latency_s(traj, 0, "open", 0) == alone.latency_s(traj, 0, "open", 0)
            assert both.fault(traj, 0, "step", 3) == alone.fault(traj, 0, "step", 3)
            assert both.tokens is not None
            assert alone.tokens is not None
            assert both.tokens(traj, 0, 2) == alone.tokens(traj, 0, 2)
            assert both.pull is not None
            assert both.pull(traj, 0) == (alone.pull(traj, 0) if alone.pull else None)


def test_what_is_held_back_is_never_trained() -> None:
    config = a_virtual()
    task = config.tasks["a"].model_copy(update={"size": 50, "held_out": 0.2})
    spec = task_specs(config.model_copy(update={"tasks": {"a": task}}), draws_of(config), max_context=4096)[0]
    assert (list(spec.train), list(spec.held_out)) == (list(range(40)), list(range(40, 50)))
