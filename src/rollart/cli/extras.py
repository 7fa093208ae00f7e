"""Packages that a configuration needs beyond the core, and the line that installs them.

Invariant: what is missing is said before anything is started. Why extras: the core must install, explain and test without
an environment package, a GPU library or a cluster.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterable, Mapping

from rollart.config.problems import PACKAGE
from rollart.config.schema import EnvConfig, HFTokenizer, PretrainedModel, RunConfig
from rollart.core.errors import ConfigError

EXTRAS: Mapping[str, tuple[str, ...]] = {
    "local": ("torch", "transformers", "ray", "safetensors", "psutil"),
    "envs": ("gymnasium",),
    "reasoning-gym": ("reasoning_gym",),
    "textarena": ("textarena",),
    "textworld": ("textworld",),
    "pretrained": ("gguf", "accelerate"),
}
"""Extra of pyproject.toml to the modules that it brings and that are imported by name."""
OF_KIND: Mapping[str, str] = {
    "frozen_lake": "envs",
    "gymnasium": "envs",
    "reasoning_gym": "reasoning-gym",
    "textarena": "textarena",
    "textworld": "textworld",
}
"""Kind of environment to the extra that it needs; the other kinds need none."""


def extras_of(config: RunConfig) -> tuple[str, ...]:
    """The extras that a run with this configuration needs."""
    envs = dict.fromkeys(extra for task in config.tasks.values() if (extra := extra_of(task.env)) is not None)
    return ("local", *envs, *["pretrained"] * _converts(config))


def _converts(config: RunConfig) -> bool:
    """Whether a model comes out of a package, as a .gguf file that is to be read."""
    named = (one.path for one in (config.model, config.tokenizer) if isinstance(one, PretrainedModel | HFTokenizer))
    return any(path.startswith(PACKAGE) for path in named)


def extra_of(env: EnvConfig) -> str | None:
    """The extra that an environment of this kind needs; None: none."""
    return OF_KIND.get(env.kind)


def missing_of(extra: str, has: Callable[[str], bool]) -> list[str]:
    """The modules of an extra that are not installed."""
    return [name for name in EXTRAS[extra] if not has(name)]


def install_line(extras: Iterable[str]) -> str:
    """What installs these extras into the Python that runs this."""
    return f"{sys.executable} -m pip install 'rollart[{','.join(extras)}]'"


def installed(module: str) -> bool:
    """Can be imported; does not import it."""
    return importlib.util.find_spec(module) is not None


def require(config: RunConfig, has: Callable[[str], bool] = installed) -> None:
    """Raise ConfigError with the install line when a package is missing."""
    missing = {extra: missing_of(extra, has) for extra in extras_of(config)}
    names = [name for found in missing.values() for name in found]
    if names:
        raise ConfigError(_message(names, [extra for extra, found in missing.items() if found]))


def missing_module(name: str) -> str | None:
    """The message for a module that could not be imported; None when no extra brings it."""
    top = name.split(".", maxsplit=1)[0]
    extras = [extra for extra, names in EXTRAS.items() if top in names]
    return _message([top], extras) if extras else None


def _message(names: Iterable[str], extras: Iterable[str]) -> str:
    return f"not installed: {', '.join(names)}\nrun: {install_line(extras)}"
