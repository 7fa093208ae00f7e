"""reasoning-gym's data sets as tasks: the seed is the item in every process, one stated rule finds the answer."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from pydantic import ValidationError

from rollart.config.schema import ReasoningGymEnv, RunConfig, TaskConfig
from rollart.core.errors import ConfigError
from rollart.runtime.envs.reasoning_gym import ReasoningGym, answer_in, dataset_names
from rollart.runtime.envs.tasks import instances


def gym(dataset: str = "chain_sum", **fields: Any) -> ReasoningGym:
    return ReasoningGym(ReasoningGymEnv.model_validate({"kind": "reasoning_gym", "dataset": dataset, **fields}))


SUM: dict[str, Any] = {"kwargs": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}, "answer": "whole"}


def solved(question: str) -> str:
    """The test's questions ask for the sum or difference of two digits."""
    left, sign, right = question.split(":")[1].split()[:3]
    return str(int(left) + int(right) if sign == "+" else int(left) - int(right))


def test_the_question_of_a_seed_is_answered_and_scored_once() -> None:
    env = gym(**SUM)
    for seed in range(20):
        step_of = env.reset(seed)
        right = env.step(f" {solved(step_of)} ")
        assert (right.reward, right.terminated, right.bad_action, right.metrics) == (1.0, True, False, {"exact": 1.0})
        assert env.reset(seed) == step_of
        wrong = env.step("w")
        assert (wrong.reward, wrong.terminated, wrong.bad_action, wrong.metrics["exact"]) == (0.0, True, False, 0.0)


@pytest.mark.parametrize(
    ("rule", "text", "answer"),
    [
        ("tag", "so <answer> 4 </answer>.", "4"),
        ("tag", "<answer>3</answer> no, <answer>\n4\n</answer>", "4"),
        ("tag", "<answer>1<answer>2</answer>", "2"),
        ("tag", "<answer>4", None),
        ("tag", "4", None),
        ("tag", "<answer> </answer>", None),
        ("last_line", "I think\n 4 \n\n", "4"),
        ("last_line", " \n", None),
        ("whole", " a b ", "a b"),
        ("whole", "", None),
    ],
)
def test_the_rule_that_finds_the_answer(rule: str, text: str, answer: str | None) -> None:
    assert answer_in(text, rule) == answer


def test_no_answer_and_one_that_scoring_cannot_read_are_bad_actions_and_no_failures() -> None:
    env = gym()
    assert env.reset(0).endswith("between <answer> and </answer>.\n")
    assert (step := env.step("17")).bad_action
    assert (step.reward, step.terminated) == (0.0, True)
    primes = gym("prime_factorization", answer="whole")
    primes.reset(0)
    assert (step := primes.step("zzz ]{")).bad_action, "score_answer raises ValueError on it"
    assert step.reward == 0.0


def test_a_random_action_has_the_form_of_an_answer_and_is_blind_to_the_question() -> None:
    env = gym(**SUM)
    actions = {env.random_action(random.Random(n)) for n in range(40)}
    assert len(actions) > 5
    assert all(action is not None and action.lstrip("-").isdigit() for action in actions)
    tagged = gym().random_action(random.Random(0))
    assert tagged is not None
    assert tagged.startswith("<answer>")
    assert gym("graph_color").random_action(random.Random(0)) is None, "its items hold no answer"


@pytest.mark.parametrize("dataset", ["list_functions", "pool_matrix", "letter_counting"])
def test_the_seed_decides_the_item_whatever_else_draws(dataset: str) -> None:
    """The first two draw from the global generators, although they have a seed of their own."""
    env = gym(dataset, items=40)
    first = [env.reset(seed) for seed in range(8)]
    before = random.getstate()
    with ThreadPoolExecutor(4) as pool:
        again = list(pool.map(lambda seed: gym(dataset, items=40).reset(seed), [*range(7, -1, -1)] * 3))
    assert again == first[::-1] * 3
    assert random.getstate() == before
    code = f"""
import json, random
random.seed(77)
from rollart.config.schema import ReasoningGymEnv
from rollart.runtime.envs.reasoning_gym import ReasoningGym
env = ReasoningGym(ReasoningGymEnv(kind="reasoning_gym", dataset={dataset!r}, items=40))
print(json.dumps([env.reset(seed) for seed in range(8)]))
"""
    there = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "5"}
    )
    assert json.loads(there.stdout) == first


def test_equal_questions_are_one_problem_and_a_seed_counts_modulo_the_items() -> None:
    env = gym(**SUM, items=1000)
    by_question: dict[str, set[int]] = {}
    for seed in range(400):
        by_question.setdefault(env.reset(seed), set()).add(env.canonical(seed))
    assert len(by_question) < 400
    assert all(len(ids) == 1 for ids in by_question.values())
    assert len(set.union(*by_question.values())) == len(by_question)
    assert env.reset(3) == env.reset(1003)
    assert gym(**SUM, data_seed=1).reset(3) != env.reset(3)
    env_config = {"kind": "reasoning_gym", "dataset": "chain_sum", **SUM}
    split = instances("sums", TaskConfig.model_validate({"env": env_config, "size": 100, "held_out": 0.2}))
    assert len({env.canonical(seed) for seed in (*split.train, *split.held_out)}) == 100


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dataset": "chain_sums"}, "did you mean 'chain_sum'"),
        ({"dataset": "nope"}, "no such data set; `rollart envs list reasoning_gym` names them all"),
        ({"dataset": "chain_sum", "kwargs": {"min_termz": 2}}, "min_termz"),
        ({"dataset": "composite"}, "Must specify at least one dataset"),
    ],
)
def test_what_reasoning_gym_refuses_is_refused_with_its_reason(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        gym(**fields)


def test_a_configuration_that_cannot_hold_is_refused_when_it_is_read() -> None:
    for key, field in (("size", "items"), ("seed", "data_seed")):
        with pytest.raises(ValidationError, match=f"write env.{field}"):
            ReasoningGymEnv(kind="reasoning_gym", dataset="chain_sum", kwargs={key: 1})
    env = {"kind": "reasoning_gym", "dataset": "chain_sum", "items": 10}
    with pytest.raises(
        ValidationError, match=r"tasks.a.size=11 is more than tasks.a.env.items=10; use tasks.a.env.items=11"
    ):
        RunConfig.model_validate({"tasks": {"a": {"env": env, "size": 11}}})


def test_all_data_sets_are_known_by_name() -> None:
    names = dataset_names()
    assert len(names) > 100
    assert {"chain_sum", "countdown", "sudoku"} <= set(names)
