"""Layers, origins and refusals of a configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from rollart.config.load import Known, Resolved, resolve
from rollart.config.schema import (
    Algorithm,
    FrozenLakeEnv,
    NoCorrection,
    PythonEnv,
    RunConfig,
    Schedule,
    TaskConfig,
    TruncatedIS,
)
from rollart.core.errors import ConfigError


def two_tasks() -> RunConfig:
    return RunConfig(
        name="two",
        tasks={
            "lake": TaskConfig(env=FrozenLakeEnv(kind="frozen_lake"), max_turns=12),
            "mine": TaskConfig(env=PythonEnv(kind="python", entry="m:C", kwargs={"a": {"b": 1}, "c": 2}), size=10),
        },
        schedule=Schedule(batch=32, group_size=8),
    )


def uncorrected() -> RunConfig:
    return RunConfig(
        tasks=two_tasks().tasks,
        schedule=Schedule(max_staleness=0),
        algorithm=Algorithm(correction=NoCorrection(kind="none")),
    )


KNOWN = Known(
    recipes={"two": two_tasks, "uncorrected": uncorrected},
    presets={"sync": {"schedule": {"max_staleness": 0}}, "far": {"schedule": {"max_staleness": 7}}},
)


def load(*words: str, source: str = "two", profile: str | Mapping[str, Any] | None = None) -> Resolved:
    return resolve(source, words, profile=profile, known=KNOWN)


def refused(*words: str, source: str = "two", profile: str | Mapping[str, Any] | None = None) -> str:
    with pytest.raises(ConfigError) as error:
        load(*words, source=source, profile=profile)
    return str(error.value)


def file_with(folder: Path, text: str, name: str = "run.yaml") -> str:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


# --- layers ----------------------------------------------------------------------------------------------------------


def test_each_layer_lies_over_the_one_before(tmp_path: Path) -> None:
    source = file_with(
        tmp_path,
        "base: two\npresets: far\noptimizer:\n  lr: 1e-4\n  beta1: 0.5\ntrainer: {threads: 2}\nengine: {count: 2}\n",
    )
    resolved = load("optimizer.lr=0.5", source=source, profile={"trainer": {"threads": 3}, "optimizer": {"beta1": 0.6}})
    config, origins = resolved.config, {key: str(origin) for key, origin in resolved.origins.items()}
    assert (config.optimizer.lr, origins["optimizer.lr"]) == (0.5, "command line")
    assert (config.optimizer.beta1, origins["optimizer.beta1"]) == (0.6, "profile")
    assert (config.trainer.threads, origins["trainer.threads"]) == (3, "profile")
    assert (config.engine.count, origins["engine.count"]) == (2, f"file {source}:7")
    assert (config.schedule.max_staleness, origins["schedule.max_staleness"]) == (7, "preset far")
    assert (config.schedule.batch, origins["schedule.batch"]) == (32, "recipe two")
    assert (config.schedule.mix_window, origins["schedule.mix_window"]) == (10, "default")


def test_a_preset_on_the_command_line_lies_under_its_values_whatever_their_order() -> None:
    resolved = load("schedule.max_staleness=3", "sync")
    assert resolved.config.schedule.max_staleness == 3
    assert load("sync").config.schedule.max_staleness == 0


def test_a_profile_file_is_named_with_its_line(tmp_path: Path) -> None:
    profile = file_with(tmp_path, "# this machine\ntrainer:\n  threads: 2\n", "machine.yaml")
    assert str(load(profile=profile).origins["trainer.threads"]) == f"profile {profile}:3"


def test_a_file_may_start_from_another_file(tmp_path: Path) -> None:
    file_with(tmp_path, "base: two\nseed: 5\nname: below\n", "below.yaml")
    config = load(source=file_with(tmp_path, "base: below.yaml\nname: above\n")).config
    assert (config.name, config.seed, config.schedule.batch) == ("above", 5, 32)


def test_files_that_name_each_other_are_refused(tmp_path: Path) -> None:
    source = file_with(tmp_path, "base: run.yaml\n")
    assert "break the circle" in refused(source=source)


def test_maps_merge_and_lists_replace() -> None:
    resolved = load(
        "tasks.mine.env.kwargs.a.d=[1, 2]", "tasks.mine.env.kwargs.e=1e-3", profile={"tasks": {"lake": {"ratio": 2.0}}}
    )
    mine = resolved.config.tasks["mine"].env
    assert isinstance(mine, PythonEnv)
    assert mine.kwargs == {"a": {"b": 1, "d": [1, 2]}, "c": 2, "e": 0.001}
    assert resolved.config.tasks["lake"].ratio == 2.0
    again = load(
        "tasks.mine.env.kwargs.a.d=[3]", profile={"tasks": {"mine": {"env": {"kwargs": {"a": {"d": [1, 2]}}}}}}
    )
    env = again.config.tasks["mine"].env
    assert isinstance(env, PythonEnv)
    assert env.kwargs["a"] == {"b": 1, "d": [3]}


def test_another_kind_takes_the_keys_of_the_former_one_away() -> None:
    three = load("algorithm.correction.kind=tis", "algorithm.correction.cap=3", source="uncorrected").config
    assert three.algorithm.correction == TruncatedIS(kind="tis", cap=3)
    words = ("algorithm.correction.kind=none", "schedule.max_staleness=0")
    changed = load(*words, profile={"algorithm": {"correction": {"kind": "tis", "cap": 3}}})
    assert changed.config.algorithm.correction == NoCorrection(kind="none")
    assert "algorithm.correction.cap" not in changed.origins
    digits = load("tasks.lake.env.kind=max_digit").config.tasks["lake"]
    assert digits.env.kind == "max_digit"
    assert digits.max_turns == 12, "what stands beside the part with the kind stays"


def test_a_kind_and_its_keys_may_come_in_any_order() -> None:
    config = load("algorithm.correction.cap=3", "algorithm.correction.kind=tis", source="uncorrected").config
    assert config.algorithm.correction == TruncatedIS(kind="tis", cap=3)


def test_null_takes_a_task_away_and_a_new_one_can_be_put_in() -> None:
    words = ("tasks.lake=null", "tasks.sum.env={kind: python, entry: sums:Sum}", "tasks.sum.size=5")
    assert list(load(*words).config.tasks) == ["mine", "sum"]


def test_an_optional_part_can_be_put_in_and_taken_away() -> None:
    with_scorer = load("tasks.mine.scorer.entry=judge:score").config.tasks["mine"].scorer
    assert with_scorer is not None
    assert with_scorer.kind == "python"
    profile = {"tasks": {"mine": {"scorer": {"kind": "python", "entry": "judge:score"}}}}
    assert load("tasks.mine.scorer=null", profile=profile).config.tasks["mine"].scorer is None


def test_a_field_that_takes_text_takes_it_as_it_stands() -> None:
    config = load("name=007", "output_dir=a: b #c", r'tokenizer.alphabet="01\n"').config
    assert (config.name, config.output_dir) == ("007", "a: b #c")
    assert config.tokenizer.model_dump()["alphabet"] == "01\n"


def test_every_value_has_an_origin_and_nothing_else_has() -> None:
    def dotted(values: Mapping[str, Any], prefix: str = "") -> list[str]:
        found: list[str] = []
        for key, value in values.items():
            inside = isinstance(value, Mapping) and value
            found += dotted(value, f"{prefix}{key}.") if inside else [f"{prefix}{key}"]
        return found

    resolved = load("algorithm.advantage.kind=rloo")
    assert list(resolved.origins) == dotted(resolved.config.model_dump())


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["schedule.max_stalenes=2"], "schedule.max_stalenes: unknown; did you mean schedule.max_staleness? (command line)"),
        (["max_staleness=2"], "max_staleness: unknown; did you mean schedule.max_staleness? (command line)"),
        (["sched.batch=2"], "sched.batch: unknown; did you mean schedule.batch? (command line)"),
        (["tasks.lake.env.digit=2"], "unknown for kind=frozen_lake; did you mean tasks.lake.env.digits?"),
        (["ratio=2"], "ratio: unknown; did you mean tasks.NAME.ratio?"),
        (
            ["algorithm.correction.kind=none", "algorithm.correction.cap=3"],
            "algorithm.correction.cap is not a key of kind=none (it belongs to kind=clip and kind=tis); leave it out",
        ),
        (
            ["tasks.lake.env.digits=3"],
            "tasks.lake.env.digits is not a key of kind=frozen_lake (it belongs to kind=max_digit)",
        ),
        (
            ["world.kind=inline", "world.object_store_mb=99"],
            "world.object_store_mb is not a key of kind=inline (it belongs to kind=local)",
        ),
        (["algorithm.loss.kind=ppo_clp"], "algorithm.loss.kind=ppo_clp: unknown; did you mean algorithm.loss.kind=ppo_clip?"),
        (["failure.on_failure=drop"], "write failure.on_failure.kind=drop"),
        (["model=null"], "model=null (command line): model has keys of its own; choose model.kind from scratch, pretrained"),
        (["schedule=3"], "schedule has keys of its own; set those, e.g. schedule.steps=VALUE"),
        (["tasks=3"], "tasks is a map of names"),
        (["seed.x=3"], "seed.x: seed is a single value and has no keys; write seed=VALUE"),
        (["tasks.mine.env.kwargs=3"], "tasks.mine.env.kwargs has keys of its own"),
        (["tasks.lak.ratio=2"], "tasks.lak.env is missing; choose tasks.lak.env.kind from"),
        (["tasks.lak.ratio=2"], "did you mean tasks.lake?"),
        (["tasks.new.env.digits=2"], "tasks.new.env.kind is missing; use one of frozen_lake, max_digit"),
        (["tasks.lak=null"], "there is no tasks.lak to take away; did you mean tasks.lake?"),
        (["schedule=3", "schedule.batch=32"], "schedule is given one value and keys of its own on the same command line"),
        (["snc"], "snc: neither key=value nor a preset; did you mean sync?"),
        (["=3"], "is no dotted key"),
        (["schedule..batch=3"], "is no dotted key"),
        (["schedule.batch=[1"], "schedule.batch:1: this is not YAML"),
    ],
)  # fmt: skip
def test_an_unknown_key_names_the_variant_and_the_nearest_key(words: Sequence[str], message: str) -> None:
    """Field case 37: an unknown key is an error with the nearest name."""
    assert message in refused(*words)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("schedule.steps=0", "schedule.steps=0 (command line): too small; write 1 or more"),
        ("schedule.steps=1.5", "schedule.steps=1.5 (command line): write a whole number"),
        ("schedule.steps=true", "schedule.steps=true (command line): write a whole number"),
        ("schedule.steps=many", "schedule.steps=many (command line): write a whole number"),
        ("optimizer.lr=fast", "optimizer.lr=fast (command line): write a number"),
        ("optimizer.lr=.inf", "optimizer.lr=.inf (command line): write a finite number"),
        ("deadlines.turn_s=0", "deadlines.turn_s=0 (command line): too small; write more than 0"),
        ("sampling.temperature=1e-4", "sampling.temperature=0.0001 (command line): too small; write 0.001 or more"),
        ("sampling.top_p=1.5", "sampling.top_p=1.5 (command line): too large; write 1 or less"),
        ("optimizer.beta1=1", "optimizer.beta1=1 (command line): too large; write less than 1"),
        ("algorithm.shuffle_rewards=1", "algorithm.shuffle_rewards=1 (command line): write true or false"),
        ("algorithm.loss.normalize=tokn", "write 'trajectory', 'sequence', 'token' or 'constant'; did you mean token?"),
        (
            "algorithm.correction={kind: tis, cap: -1}",
            "algorithm.correction.cap=-1 (command line): too small; write more than 0",
        ),
        ("name=a/b", "name=a/b (command line): write text that matches"),
    ],
)
def test_a_bad_value_is_one_line_with_the_value_and_the_remedy(word: str, message: str) -> None:
    text = refused(word)
    assert message in text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["schedule.batch=33"], "schedule.batch=33 is not a multiple of schedule.group_size=8; use 32 or 40"),
        (["schedule.steps_per_batch=3"], "does not divide the 4 groups of a batch; use 1, 2, 4"),
        (["schedule.sync_order=paper", "schedule.max_staleness=0"], "use max_staleness=1 for a one-off pipeline"),
        (["schedule.group_size=1"], "schedule.group_size=1 with algorithm.advantage=grpo: a group baseline over one member"),
        (["failure.min_group_size=9"], "failure.min_group_size=9 is above schedule.group_size=8"),
        (["failure.min_group_size=1"], "a group baseline needs 2 members or more"),
        (["model.hidden=66"], "model.hidden=66 is not a multiple of model.heads=4"),
        (["model.hidden=68", "model.heads=4"], "it must be even"),
        (["model.kv_heads=3"], "model.heads=4 is not a multiple of model.kv_heads=3"),
        (["tasks.lake.size=2"], "tasks.lake.size=2: there is one default map"),
        (["tasks.lake.size=2", "tasks.lake.env.slippery=true"], "tasks.lake.size=2: there is one default map"),
        (["engine.kv_tokens=300"], "engine.kv_tokens=300 is below model.max_positions=512"),
        (["engine.kv_tokens=300"], "use engine.kv_tokens=512 or more"),
        (["envs.sessions_per_host=90", "envs.hosts=2"], "is 180 sessions, but 192 may be open at once (64 attempts"),
        (["envs.sessions_per_host=90", "envs.hosts=2"], "use envs.sessions_per_host=96 or more"),
        (["tasks.lake.env.side=5"], "tasks.lake.env.side=5"),
        (["tasks.mine.held_out=0.01"], "leaves nothing to train or nothing held back"),
        (["tasks.mine.env.kind=max_digit", "tasks.mine.env.digits=1", "tasks.mine.size=11"], "makes only 10 different"),
        (["tokenizer.alphabet=abc"], "tokenizer.alphabet has no newline"),
        (['tokenizer.alphabet="aab\\n"'], "holds 'a' more than once"),
        (["tasks.mine=null", "tasks.lake=null"], "tasks is empty; name at least one task"),
    ],
)  # fmt: skip
def test_a_rule_across_keys_is_told_with_the_values_and_the_way_out(words: Sequence[str], message: str) -> None:
    """Field case 12: among them, a group baseline over groups of one is refused with the reason."""
    text = refused(*words)
    assert message in text
    assert text.count("\n") == 0


def test_the_smallest_pools_that_the_message_names_are_accepted() -> None:
    sessions = ["envs.hosts=2", "envs.sessions_per_host=96"]
    assert load("engine.kv_tokens=512", *sessions).config.envs.sessions_per_host == 96


def test_a_broken_rule_says_where_its_values_were_set() -> None:
    text = refused("schedule.batch=33", profile={"schedule": {"group_size": 4}})
    assert text.endswith("(schedule.batch: command line, schedule.group_size: profile)")


def test_all_errors_of_a_configuration_come_together(tmp_path: Path) -> None:
    source = file_with(tmp_path, "base: two\nschedule:\n  steps: none\nengin: {count: 2}\n")
    lines = refused("optimizer.lr=-1", "sink", "schedule.batch=33", source=source).splitlines()
    assert (
        lines
        == [
            "5 errors in the configuration:",
            "  sink: neither key=value nor a preset; did you mean sync?",
            f"  engin.count: unknown; did you mean engine.count? (file {source}:4)",
            "  tokenizer.alphabet has no newline, which ends a turn; add \\n",
            f"  schedule.steps=none (file {source}:3): write a whole number",
            "  optimizer.lr=-1 (command line): too small; write 0 or more",
        ]
        or len(lines) == 5
    )


def test_an_unknown_recipe_names_the_nearest() -> None:
    assert refused(source="tow") == "tow: neither a recipe nor a .yaml file; did you mean two?"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("base: two\nseed: 1\nseed: 2\n", ":3: seed is given twice (first on line 2); keep one of them"),
        ("base: two\nschedule:\n  batch: 8\n  batch: 16\n", ":4: schedule.batch is given twice"),
        ("base: two\nseed: [1\n", "this is not YAML"),
        ("base: tow\n", ":1: base=tow: neither a recipe nor a file; did you mean two?"),
        ("base: [two]\n", "write a recipe's name or a file's path"),
        ("base: two\npresets: [snc]\n", ":2: snc: no such preset; did you mean sync?"),
        ("- base\n", "a configuration is a map of keys"),
        ("base: two\nschedule: &s {batch: 8}\neval: *s\n", "an alias"),
        ("base: two\n? [a]\n: b\n", "a key must be a word"),
    ],
)
def test_a_bad_file_is_refused_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    source = file_with(tmp_path, text)
    assert source in refused(source=source)
    assert message in refused(source=source)


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    source = str(tmp_path / "nowhere.yaml")
    assert refused(source=source).startswith(f"{source}: cannot be read: No such file")
    assert refused(profile=source).startswith(f"{source}: cannot be read: No such file")
