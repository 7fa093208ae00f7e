"""reasoning-gym's data sets as single turns: the question, then the answer, scored by the data set itself.

Invariant: the seed modulo `items` is the item, the same in every process (the data set's own seed is always set), and two
items with one question are one problem. What the answer is in what the model wrote is decided by one stated rule
(`env.answer`), before the data set sees it; where there is none, or the scoring cannot read it, the turn is a bad action with
reward 0 and never a failure.

A data set is made once per process: some take seconds.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import json
import random
import re
from typing import Any

from rollart.config.schema import ReasoningGymEnv
from rollart.core.errors import ConfigError, EnvError
from rollart.runtime.envs.draws import Draws
from rollart.runtime.envs.text import StepResult, TextTask

TAGGED = re.compile(r"<answer>(?:(?!<answer>).)*?</answer>", re.DOTALL)
"""Tags with none opened between them: of `<answer>1<answer>2</answer>` the answer is 2."""
ASKS_FOR_TAGS = "Write the answer between <answer> and </answer>.\n"
OTHER_ITEMS = 8
"""Items that are asked for an answer that a random action can repeat: a few data sets give none with their items."""
UNREADABLE = (
    ValueError,
    TypeError,
    LookupError,
    ArithmeticError,
    AttributeError,
    SyntaxError,
    AssertionError,
    RecursionError,
)
"""What scoring code raises on a text that it did not expect. A missing file or memory is not among them: that is a failure."""


class ReasoningGym(TextTask):
    """One attempt at one item."""

    def __init__(self, config: ReasoningGymEnv) -> None:
        self._config = config
        self._data = dataset(config.dataset, config.items, config.data_seed, json.dumps(config.kwargs, sort_keys=True))
        self._item: Any = None
        asked = ASKS_FOR_TAGS if config.answer == "tag" else ""
        self._instruction = asked if config.instruction is None else config.instruction

    def reset(self, seed: int) -> str:
        self._item = self._entry(seed)
        return f"{self._item['question']}\n{self._instruction}"

    def step(self, action: str) -> StepResult:
        """Score the answer; there is no second try. The metric `exact` is 1 for the very answer that the item holds."""
        if self._item is None:
            raise EnvError(f"{self._config.dataset}: step without a problem; call reset first")
        item, self._item = self._item, None
        answer = answer_in(action, self._config.answer)
        if answer is None:
            return StepResult("no answer\n", terminated=True, bad_action=True, metrics={"exact": 0.0})
        try:
            reward = float(self._data.score_answer(answer, item))
        except UNREADABLE:
            return StepResult("unreadable answer\n", terminated=True, bad_action=True, metrics={"exact": 0.0})
        exact = float(answer == item["answer"])
        return StepResult(f"score {reward:g}\n", reward=reward, terminated=True, metrics={"exact": exact})

    def canonical(self, seed: int) -> int:
        """Of the question: items of unlike numbers may ask the same."""
        return int.from_bytes(hashlib.blake2b(self._entry(seed)["question"].encode(), digest_size=8).digest(), "big")

    def random_action(self, rng: random.Random) -> str | None:
        """The answer of some item, so it has the right form and is blind to the problem; None: the items hold no answers."""
        for _ in range(OTHER_ITEMS):
            answer = self._entry(rng.randrange(self._config.items))["answer"]
            if isinstance(answer, str):
                return f"<answer>{answer}</answer>" if self._config.answer == "tag" else answer
        return None

    def _entry(self, seed: int) -> Any:
        index = seed % self._config.items
        # a few data sets draw from the global generators, although they have a seed of their own
        return Draws(index).within(lambda: self._data[index])


def answer_in(text: str, rule: str) -> str | None:
    """The answer in what was written, by the rule of `env.answer`; None: there is none."""
    if rule == "tag":
        found = TAGGED.findall(text)
        answer = found[-1].removeprefix("<answer>").removesuffix("</answer>") if found else ""
    elif rule == "last_line":
        answer = next((line for line in reversed(text.splitlines()) if line.strip()), "")
    else:
        answer = text
    return answer.strip() or None


@functools.lru_cache(maxsize=16)
def dataset(name: str, items: int, data_seed: int, kwargs: str) -> Any:
    """The data set of this name; `kwargs` is JSON. Raises ConfigError when there is none, or it refuses its arguments."""
    known = dataset_names()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "`rollart envs list reasoning_gym` names them all"
        raise ConfigError(f"env.dataset={name!r}: reasoning-gym has no such data set; {hint}")
    given = json.loads(kwargs)
    try:
        make = functools.partial(import_reasoning_gym().create_dataset, name, size=items, seed=data_seed, **given)
        made = Draws(data_seed).within(make)
        Draws(0).within(lambda: made[0])
    except UNREADABLE as error:
        raise ConfigError(
            f"env.dataset={name!r} with items={items} and kwargs={kwargs} is refused by reasoning-gym: "
            f"{type(error).__name__}: {error}; change env.kwargs"
        ) from error
    return made


def dataset_names() -> list[str]:
    """All data sets that there are, sorted. Raises ConfigError when the package is not installed."""
    import_reasoning_gym()
    from reasoning_gym.factory import DATASETS

    return sorted(DATASETS)


def import_reasoning_gym() -> Any:
    """The package, or a ConfigError with the line that installs it."""
    try:
        import reasoning_gym
    except ImportError as error:
        raise ConfigError(
            f"this task needs reasoning-gym, which cannot be imported ({error}); install it with: "
            'pip install "rollart[reasoning-gym]"'
        ) from None
    return reasoning_gym
