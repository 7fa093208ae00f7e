"""From configuration to task instances: the split is by problem, the same everywhere, and readers can draw their own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rollart.config.schema import CharsTokenizer, PretrainedModel, RunConfig, ScratchModel, TaskConfig
from rollart.core.errors import ConfigError
from rollart.runtime.envs.frozen_lake import FrozenLake
from rollart.runtime.envs.tasks import build_env, eval_instances, held_back, instances, max_context, task_specs
from rollart.runtime.tokenizers import build_tokenizer


def task(kind: str, **fields: Any) -> TaskConfig:
    env = {"kind": kind, **fields.pop("env", {})}
    return TaskConfig.model_validate({"env": env, **fields})


DIGITS = task("max_digit", size=1000, held_out=0.2)
RANDOM_LAKES = task("frozen_lake", env={"map": "random"}, size=200, held_out=0.25)


def test_a_fifth_of_the_problems_is_held_back_and_none_is_on_both_sides() -> None:
    split = instances("digits", DIGITS)
    assert sorted(split.train + split.held_out) == list(range(1000))
    assert 160 <= len(split.held_out) <= 240
    assert split.trained_ids == set(split.train)


def test_equal_maps_of_unlike_seeds_count_once_and_stay_on_one_side() -> None:
    split = instances("lakes", RANDOM_LAKES)
    env = build_env(RANDOM_LAKES)
    assert isinstance(env, FrozenLake)
    train, held_out = ({env.rows(seed) for seed in seeds} for seeds in (split.train, split.held_out))
    assert len(train) + len(held_out) == len(split.train) + len(split.held_out) == 200
    assert not train & held_out
    assert held_out


def test_the_split_is_the_same_in_every_process() -> None:
    code = (
        "from rollart.runtime.envs.tasks import held_back;"
        "print([n for n in range(300) if held_back(n, 0.2)], held_back(2**90 + 1, 0.5))"
    )
    there = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "77"}
    ).stdout.strip()
    here = [n for n in range(300) if held_back(n, 0.2)]
    assert there == f"{here} {held_back(2**90 + 1, 0.5)}"
    assert here[:5] == [5, 12, 15, 33, 34], (
        "a changed split would let runs of unlike versions train on held-back problems"
    )


def test_specs_say_what_control_must_know() -> None:
    config = RunConfig.model_validate(
        {
            "tasks": {
                "lake": {"env": {"kind": "frozen_lake"}, "max_turns": 12, "max_tokens": 2, "ratio": 2.0},
                "digits": {
                    "env": {"kind": "max_digit"},
                    "size": 1000,
                    "held_out": 0.2,
                    "success_at": 0.5,
                    "scorer": {"kind": "python", "entry": "a:b"},
                },
            },
            "model": {"kind": "scratch", "max_positions": 320},
        }
    )
    tokenizer = build_tokenizer(CharsTokenizer())
    lake, digits = task_specs(config, tokenizer)
    assert (lake.name, lake.train, lake.held_out, lake.ratio) == ("lake", (0,), (), 2.0)
    assert (lake.max_turns, lake.max_tokens, lake.max_context) == (12, 2, 320)
    assert (lake.stop_ids, lake.scored, lake.success_at) == (tokenizer.stop_ids, False, 1.0)
    assert (digits.name, len(digits.train) + len(digits.held_out)) == ("digits", 1000)
    assert (digits.scored, digits.success_at) == (True, 0.5)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (task("max_digit", env={"digits": 1}, size=12), "only 10 different instances were found; use size=10 or less"),
        (task("frozen_lake", size=1, held_out=0.2), "leaves 1 instances to train on and 0 held back"),
        (task("frozen_lake", env={"map": "random", "side": 2}, size=9), "only 3 different instances"),
    ],
)
def test_instances_that_are_not_there_are_refused(config: TaskConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        instances("t", config)


def test_a_readers_own_instances_are_told_apart_by_problem() -> None:
    split = instances("digits", DIGITS)
    drawn = eval_instances("digits", DIGITS, 5, 400)
    assert drawn == eval_instances("digits", DIGITS, 5, 400)
    assert [each.seed for each in drawn] != [each.seed for each in eval_instances("digits", DIGITS, 6, 400)]
    assert all(0 <= each.seed < 2**31 for each in drawn)
    assert max(each.seed for each in drawn) > 2**30
    for each in drawn:
        assert each.canonical == each.seed % 1000
        assert each.split == ("held_out" if each.canonical in split.held_out else "train")


def test_a_readers_random_maps_may_be_unseen_and_the_default_map_never_is() -> None:
    sides = {each.split for each in eval_instances("lakes", RANDOM_LAKES, 1, 100)}
    assert sides == {"train", "held_out", "unseen"}
    default = eval_instances("lake", task("frozen_lake"), 1, 50)
    assert {(each.split, each.canonical) for each in default} == {("train", default[0].canonical)}


def test_context_of_a_pretrained_model_is_read_from_its_folder(tmp_path: Path) -> None:
    model = PretrainedModel(kind="pretrained", path=str(tmp_path))
    with pytest.raises(ConfigError, match=r"cannot read config\.json"):
        max_context(model)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="none of max_position_embeddings"):
        max_context(model)
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 2048}))
    assert max_context(model) == 2048
    assert max_context(ScratchModel(max_positions=64)) == 64


def test_the_digest_of_the_data_is_another_one_when_the_instances_are() -> None:
    """Field case 34: the part of the task: a changed environment, scorer or set of problems is another data set, and what does
    not change the problems is not."""
    same = [RANDOM_LAKES, RANDOM_LAKES.model_copy(update={"max_turns": 9, "ratio": 3.0, "success_at": 0.5})]
    others = [
        task("frozen_lake", env={"map": "random", "slippery": True}, size=200, held_out=0.25),
        task("frozen_lake", env={"map": "random"}, size=199, held_out=0.25),
        task(
            "frozen_lake", env={"map": "random"}, size=200, held_out=0.25,
            scorer={"kind": "python", "entry": "package.module:score"},
        ),
    ]  # fmt: skip
    assert len({instances("lakes", one).data for one in same}) == 1
    assert len({instances("lakes", one).data for one in [*same, *others]}) == 4
    config = RunConfig(tasks={"lakes": RANDOM_LAKES})
    [spec] = task_specs(config, build_tokenizer(CharsTokenizer()))
    assert spec.data == instances("lakes", RANDOM_LAKES).data
