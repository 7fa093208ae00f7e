"""`rollart envs list [KIND]`: which environments there are. `rollart envs try WHAT [key=value ..]`: play one without a model.

WHAT is a kind (`rollart envs try textarena id=2048-v0`), your own class (`mine.games:Parity`), or a task of a recipe or
file (`first_run/max_digit`). Exit code 1: `try` found something wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from rollart.cli import configured, envs_text, extras
from rollart.cli.work import Work
from rollart.config import load, nearest
from rollart.config.load import Known
from rollart.config.schema import EnvConfig, MaxDigitEnv, Node, RunConfig, TaskConfig
from rollart.config.shape import Scalar, kind_of, shapes
from rollart.core.errors import ConfigError
from rollart.recipes.registry import RECIPES, resolve

SUMMARY = "list environments, or play one without a model"
KINDS: Mapping[str, type[Node]] = {str(kind_of(model)): model for model in get_args(get_args(EnvConfig)[0])}
"""Kind of environment to its part of the configuration."""
ONLY_TASK = "it"
"""Name of the task that is made for a kind or a class."""
TRY_TURNS = 50
"""Turns of an episode where no task says how many: enough for most games to end."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("list", "try"), help="list: kinds, or what KIND offers; try: play WHAT")
    parser.add_argument(
        "what", metavar="WHAT", nargs="?", help="a kind; for try also package.module:Class or RECIPE/TASK"
    )
    parser.add_argument(
        "words", metavar="key=value", nargs="*", help="of the environment, or of its task, e.g. max_turns=5"
    )
    parser.add_argument("--agent", choices=("random",), default="random", help="who plays (default: random actions)")
    parser.add_argument("--action", dest="actions", metavar="TEXT", action="append", default=[], help="draw from these")
    parser.add_argument("--episodes", type=int, default=10, metavar="N", help="how many (default: 10)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="the first problem (default: 0)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace, work: Work) -> int:
    if arguments.action == "try":
        return _try(arguments)
    if arguments.words:
        raise ConfigError(f"list: {arguments.words[0]} means nothing to it; leave it out")
    if arguments.what is None:
        rows = _kinds()
        return _print(arguments.json, rows, envs_text.kinds(rows))
    found = _offered(arguments.what)
    return _print(arguments.json, found, envs_text.offered(found))


# --- list ----------------------------------------------------------------------------------------------------------


def _kinds() -> list[dict[str, Any]]:
    """A row per kind, with what it needs and what can be set."""
    rows = []
    for kind, model in KINDS.items():
        extra = extras.OF_KIND.get(kind)
        missing = extras.missing_of(extra, extras.installed) if extra else []
        rows.append({
            "kind": kind,
            "what": " ".join((model.__doc__ or "").split()).split(". ")[0].rstrip("."),
            "installed": not missing,
            "install": extras.install_line([extra]) if missing and extra else None,
            "fields": [_field(name, model) for name in model.model_fields if name != "kind"],
        })  # fmt: skip
    return rows


def _field(name: str, model: type[Node]) -> dict[str, Any]:
    field, shape = model.model_fields[name], shapes(model)[name]
    return {
        "name": name,
        "default": None if field.is_required() else field.get_default(call_default_factory=True),
        "required": field.is_required(),
        "choices": list(shape.choices) if isinstance(shape, Scalar) else [],
        "what": " ".join((field.description or "").split()),
    }


def _offered(kind: str) -> dict[str, Any]:
    """What the package behind a kind offers by name; None as the reason: it can be played here."""
    if kind not in KINDS:
        raise ConfigError(f"list {kind}: no such kind{nearest.among(kind, KINDS)}")
    [row] = [row for row in _kinds() if row["kind"] == kind]
    if not row["installed"]:
        return row | {"names": {}}
    if kind == "reasoning_gym":
        from rollart.runtime.envs.reasoning_gym import dataset_names

        return row | {"key": "dataset", "names": dict.fromkeys(dataset_names())}
    if kind == "textarena":
        from rollart.runtime.envs.textarena_games import games

        return row | {"key": "id", "names": games()}
    return row | {"names": {}}


# --- try -----------------------------------------------------------------------------------------------------------


def _try(arguments: argparse.Namespace) -> int:
    for name, least in (("episodes", 1), ("seed", 0)):
        if getattr(arguments, name) < least:
            raise ConfigError(f"--{name}={getattr(arguments, name)}: too small; write {least} or more")
    name, task = _task(arguments.what, arguments.words)
    extra = extras.extra_of(task.env)
    missing = extras.missing_of(extra, extras.installed) if extra else []
    if missing and extra:
        raise ConfigError(f"not installed: {', '.join(missing)}\nrun: {extras.install_line([extra])}")
    from rollart.runtime.envs.trial import try_env

    if "" not in sys.path:
        sys.path.insert(0, "")  # a class of the folder one stands in, as `python -m` would find it
    with contextlib.redirect_stdout(sys.stderr):  # games print
        trial = try_env(task, episodes=arguments.episodes, seed=arguments.seed, actions=arguments.actions)
    _print(arguments.json, envs_text.as_data(name, task, trial), envs_text.told(name, task, trial))
    return 1 if trial.problems else 0


def _task(what: str | None, words: Sequence[str]) -> tuple[str, TaskConfig]:
    """What to play and under which name. Raises ConfigError that says what can be named."""
    if what is None:
        raise ConfigError(
            f"try: say what to play: a kind ({', '.join(KINDS)}), your own package.module:Class, or RECIPE/TASK"
        )
    if what in KINDS or ":" in what:
        given = [f"kind={what}"] if what in KINDS else ["kind=python", f"entry={what}"]
        return what, _made([*given, *words])
    recipe, slash, name = what.rpartition("/")
    if not slash or what.endswith((".yaml", ".yml")):
        recipe, name = what, ""
    if recipe not in RECIPES and not recipe.endswith((".yaml", ".yml")):
        raise ConfigError(
            f"try {what}: no kind of environment has this name{nearest.among(what, KINDS)}\n"
            f"or write your own package.module:Class, or RECIPE/TASK (recipes: {', '.join(RECIPES)})"
        )
    tasks = resolve(recipe, words, profile=configured.profile_path(None)).config.tasks
    if not name and len(tasks) == 1:
        [name] = tasks
    if name not in tasks:
        raise ConfigError(f"try {what}: name one of its tasks: {', '.join(f'{recipe}/{task}' for task in tasks)}")
    return f"{recipe}/{name}", tasks[name]


def _made(words: Sequence[str]) -> TaskConfig:
    """The task of an environment that is given by its own keys; keys of a task may stand among them."""
    made = TaskConfig(env=MaxDigitEnv(kind="max_digit"), max_turns=TRY_TURNS)
    known = Known(recipes={"try": lambda: RunConfig(tasks={ONLY_TASK: made})}, presets={})
    of_task = [name for name in TaskConfig.model_fields if name != "size"]

    def placed(word: str) -> str:
        at = f"tasks.{ONLY_TASK}." if word.partition("=")[0].split(".")[0] in of_task else f"tasks.{ONLY_TASK}.env."
        return at + word

    try:
        return load.resolve("try", [placed(word) for word in words], known=known).config.tasks[ONLY_TASK]
    except ConfigError as error:
        raise ConfigError(str(error).replace(f"tasks.{ONLY_TASK}.", "")) from None


def _print(as_json: bool, data: object, text: str) -> int:
    sys.stdout.write(json.dumps(data, indent=1, default=str) + "\n" if as_json else text)
    return 0
