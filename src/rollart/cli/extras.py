"""Packages that a configuration needs beyond the core, and the line that installs them.

Invariant: what is missing is said before anything is started. Why extras: the core must install, explain and test without
an environment package, a GPU library or a cluster.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterable, Mapping

from rollart.config.schema import FrozenLakeEnv, GymnasiumEnv, RunConfig
from rollart.core.errors import ConfigError

EXTRAS: Mapping[str, tuple[str, ...]] = {
    "local": ("torch", "transformers", "ray", "safetensors", "psutil"),
    "envs": ("gymnasium",),
}
"""Extra of pyproject.toml to the modules that it brings and that are imported by name."""


def extras_of(config: RunConfig) -> tuple[str, ...]:
    """The extras that a run with this configuration needs."""
    needed = ["local"]
    if any(isinstance(task.env, FrozenLakeEnv | GymnasiumEnv) for task in config.tasks.values()):
        needed.append("envs")
    return tuple(needed)


def installed(module: str) -> bool:
    """Can be imported; does not import it."""
    return importlib.util.find_spec(module) is not None


def require(config: RunConfig, has: Callable[[str], bool] = installed) -> None:
    """Raise ConfigError with the install line when a package is missing."""
    missing = {extra: [name for name in EXTRAS[extra] if not has(name)] for extra in extras_of(config)}
    names = [name for found in missing.values() for name in found]
    if names:
        raise ConfigError(_message(names, [extra for extra, found in missing.items() if found]))


def missing_module(name: str) -> str | None:
    """The message for a module that could not be imported; None when no extra brings it."""
    top = name.split(".", maxsplit=1)[0]
    extras = [extra for extra, names in EXTRAS.items() if top in names]
    return _message([top], extras) if extras else None


def _message(names: Iterable[str], extras: Iterable[str]) -> str:
    return f"not installed: {', '.join(names)}\nrun: {sys.executable} -m pip install 'rollart[{','.join(extras)}]'"
