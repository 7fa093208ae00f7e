"""Your own code by name: `package.module:Name` in the configuration becomes the object that it names.

Invariant: a name that cannot be used fails with ConfigError that gives the key, the name and what was looked for where.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable
from typing import Any

from rollart.config.schema import PythonEnv
from rollart.core.errors import ConfigError
from rollart.runtime.envs.text import TextTask, complete


def resolve(entry: str, key: str) -> Callable[..., Any]:
    """The class or function that `entry` names; `key` is the configuration's key, for the message."""
    module_name, colon, name = entry.partition(":")
    if not (colon and module_name and name):
        raise ConfigError(f"{key}={entry!r} is not of the form package.module:Name")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(
            f"{key}={entry!r}: cannot import {module_name!r} ({error}); install it, or start from the folder that holds it"
        ) from error
    found = getattr(module, name, None)
    if found is None:
        near = difflib.get_close_matches(name, [known for known in vars(module) if not known.startswith("_")], n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"{key}={entry!r}: module {module_name!r} has no {name!r}{hint}")
    if not callable(found):
        raise ConfigError(f"{key}={entry!r} is a {type(found).__name__}, not a class or function")
    resolved: Callable[..., Any] = found
    return resolved


def python_env(config: PythonEnv) -> TextTask:
    """One instance of the user's class. What its constructor raises passes through: that is the user's code failing."""
    return complete(resolve(config.entry, "env.entry")(**config.kwargs), config.entry)
