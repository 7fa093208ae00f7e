"""From a recipe or a file, a machine profile and a command line to one checked configuration.

    defaults < recipe or YAML file (and its `base`, `presets`) < presets named on the command line < machine profile
             < `dotted.key=value`

Invariant: every value of the result has an origin, and everything that is wrong is reported in one ConfigError. Why no
environment variables: a run is what its `config.yaml` says, on every machine. Recipes and presets come in as arguments,
because they lie above this layer; `rollart.recipes.resolve` is the call with the built-in ones.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rollart.config import nearest
from rollart.config.origins import (
    Leaf,
    Origin,
    Problem,
    Tree,
    defaults_of,
    lay,
    leaves,
    plain,
    tree_of,
    tree_of_located,
    tree_of_node,
)
from rollart.config.refusals import problems_of
from rollart.config.schema import RunConfig
from rollart.config.shape import Scalar, Section, walk
from rollart.config.text import Located, parse, scalar_text
from rollart.core.errors import ConfigError

Recipes = Mapping[str, Callable[[], RunConfig]]
"""Name to the function that makes the typed configuration."""
Presets = Mapping[str, Mapping[str, Any]]
"""Name to a fragment: nested values that are laid over a recipe."""

COMMAND_LINE: Origin = Origin(layer="command line")
FILE_KEYS = ("base", "presets")
"""Keys of a file that are no values: the recipe or file it starts from, and the presets laid on that."""
MAX_BASES = 16
"""Files that may name one another as `base`; more is a circle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """A configuration that can be run, and where each of its values comes from."""

    config: RunConfig
    origins: Mapping[str, Origin]
    """Every dotted key of `config`, in the order of the schema."""
    source: str
    """The recipe's name or the file's path, as it was given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What can be named: recipes and presets."""

    recipes: Recipes
    presets: Presets


def resolve(
    recipe_or_file: str,
    overrides: Sequence[str] = (),
    *,
    profile: str | Mapping[str, Any] | None = None,
    known: Known,
) -> Resolved:
    """Lay all layers and check the result.

    `overrides` are `dotted.key=value` or names of presets. A value is YAML; on a field that takes text it is the text
    as it stands, unless it begins with a quote. `profile` is the path of a YAML file, or its values.
    Raises ConfigError with one line per problem.
    """
    problems: list[Problem] = []
    layers = [*_source(recipe_or_file, known)]
    values, presets = _command_line(overrides, known, problems)
    layers += presets
    if isinstance(profile, str):
        layers.append(_profile(profile))
    elif profile is not None:
        layers.append(tree_of(profile, Origin(layer="profile")))
    return _checked([*layers, *values], recipe_or_file, problems)


def load_file(path: str | Path, known: Known | None = None) -> Resolved:
    """Read one complete configuration, as a run writes it: no profile, no overrides, no recipes unless given."""
    nothing = Known(recipes={}, presets={})
    return _checked(list(_file(Path(path), known or nothing, 0)), str(path), [])


def _checked(layers: Iterable[Tree], source: str, problems: list[Problem]) -> Resolved:
    root = Section(model=RunConfig)
    tree: Tree = dict(defaults_of(RunConfig))
    for layer in layers:
        tree = lay(root, tree, layer, "", problems) or tree
    try:
        # as JSON, because strict Python input would refuse a list where the schema has a tuple
        config = RunConfig.model_validate_json(json.dumps(plain(tree)), strict=True)
    except ValidationError as error:
        told = {problem.path for problem in problems}
        problems += [found for found in problems_of(error, tree) if not _already(found, told)]
        raise ConfigError(_report(problems)) from None
    if problems:
        raise ConfigError(_report(problems))
    return Resolved(config=config, origins={key: leaf.origin for key, leaf in leaves(tree)}, source=source)


def _already(found: Problem, told: set[str]) -> bool:
    return any(path == found.path or path.startswith(f"{found.path}.") for path in told)


def _report(problems: Sequence[Problem]) -> str:
    lines = list(dict.fromkeys(problem.text for problem in problems))
    if len(lines) == 1:
        return lines[0]
    return "\n".join([f"{len(lines)} errors in the configuration:", *(f"  {line}" for line in lines)])


# --- the layers ------------------------------------------------------------------------------------------------------


def _source(name: str, known: Known) -> Iterable[Tree]:
    if name in known.recipes:
        return [tree_of_node(known.recipes[name](), Origin(layer="recipe", name=name))]
    path = Path(name).expanduser()
    if path.suffix in (".yaml", ".yml") or path.is_file():
        return _file(path, known, 0)
    near = nearest.among(name, known.recipes)
    raise ConfigError(f"{name}: neither a recipe nor a .yaml file{near}")


def _file(path: Path, known: Known, depth: int) -> Iterable[Tree]:
    if depth > MAX_BASES:
        raise ConfigError(f"{path}: more than {MAX_BASES} files name one another as base; break the circle")
    located = _read(path)
    keys: dict[str, Located] = located.value
    layers: list[Tree] = []
    base = keys.get("base")
    if base is not None:
        if not isinstance(base.value, str):
            raise ConfigError(f"{path}:{base.line}: base={base.value}: write a recipe's name or a file's path")
        if base.value in known.recipes:
            layers += _source(base.value, known)
        else:
            other = path.parent / base.value
            if not other.is_file():
                near = nearest.among(base.value, known.recipes)
                raise ConfigError(f"{path}:{base.line}: base={base.value}: neither a recipe nor a file{near}")
            layers += _file(other, known, depth + 1)
    presets = keys.get("presets")
    if presets is not None:
        names = presets.value if isinstance(presets.value, list) else [presets.value]
        layers += [_preset(str(name), known, f"{path}:{presets.line}: ") for name in names]
    own = Located(value={key: item for key, item in keys.items() if key not in FILE_KEYS}, line=1)
    return [*layers, tree_of_located(own, "file", str(path))]


def _read(path: Path) -> Located:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}; check the path") from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: is not UTF-8 text ({error.reason} at byte {error.start}); save it as UTF-8"
        ) from error
    located = parse(text, str(path))
    if located.value is None:
        return Located(value={}, line=1)
    if not isinstance(located.value, dict):
        raise ConfigError(f"{path}:{located.line}: a configuration is a map of keys; found {located.value!r}")
    return located


def _profile(name: str) -> Tree:
    path = Path(name).expanduser()
    return tree_of_located(_read(path), "profile", name)


def _preset(name: str, known: Known, where: str = "") -> Tree:
    if name not in known.presets:
        raise ConfigError(f"{where}{name}: no such preset{nearest.among(name, known.presets)}")
    return tree_of(known.presets[name], Origin(layer="preset", name=name))


def _command_line(words: Sequence[str], known: Known, problems: list[Problem]) -> tuple[list[Tree], list[Tree]]:
    """(the values as one tree, so that their order does not matter; the presets in the order given)."""
    values: dict[str, Tree] = {}
    presets: list[Tree] = []
    for word in words:
        dotted, equals, text = word.partition("=")
        if equals:
            try:
                _put(values, dotted.strip(), text)
            except ConfigError as error:
                problems.append(Problem(path=dotted, text=str(error)))
        elif word in known.presets:
            presets.append(_preset(word, known))
        else:
            near = nearest.among(word, known.presets)
            problems.append(Problem(path=word, text=f"{word}: neither key=value nor a preset{near}"))
    return [values], presets


def _put(values: dict[str, Tree], dotted: str, text: str) -> None:
    parts = dotted.split(".")
    if not all(parts):
        raise ConfigError(f"{dotted}={text}: {dotted or 'nothing'} is no dotted key; write part.key=value")
    item: Tree
    if _takes_text(dotted) and text[:1] not in ("'", '"'):
        item = Leaf(value=text, origin=COMMAND_LINE)
    else:
        item = tree_of_located(parse(text, dotted), "command line", "", lines=False)
    for part in reversed(parts[1:]):
        item = {part: item}
    _merge(values, parts[0], item, parts[0])


def _merge(at: dict[str, Tree], key: str, item: Tree, dotted: str) -> None:
    have = at.get(key)
    if isinstance(item, dict) and isinstance(have, dict):
        for name, value in item.items():
            _merge(have, name, value, f"{dotted}.{name}")
    elif have is not None and isinstance(item, dict) != isinstance(have, dict):
        raise ConfigError(f"{dotted} is given one value and keys of its own on the same command line; keep one of them")
    else:
        at[key] = item


def _takes_text(dotted: str) -> bool:
    return any(
        isinstance(key.shape, Scalar) and key.shape.takes_text and nearest.fits_whole(key.dotted, dotted)
        for key in walk()
    )


# --- writing ---------------------------------------------------------------------------------------------------------


def dump(resolved: Resolved) -> str:
    """The configuration as YAML, each value's origin as a comment. `load_file` reads the same configuration back."""
    lines = [
        f"# The resolved configuration of {resolved.config.name}, from {resolved.source}. After each value: where it comes",
        "# from. This file is complete: it can be run again as it stands.",
    ]
    _dump_part(resolved.config.model_dump(), "", 0, resolved.origins, lines)
    return "\n".join(lines) + "\n"


def _dump_part(
    values: Mapping[str, Any], prefix: str, depth: int, origins: Mapping[str, Origin], lines: list[str]
) -> None:
    for key, value in values.items():
        dotted = f"{prefix}{key}"
        head = f"{'  ' * depth}{scalar_text(key)}:"
        if isinstance(value, Mapping) and value:
            lines.append(head)
            _dump_part(value, f"{dotted}.", depth + 1, origins, lines)
        else:
            lines.append(f"{head} {scalar_text(value)}  # {origins[dotted]}")
