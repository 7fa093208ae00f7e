"""YAML in and out, in the dialect of configurations: YAML 1.2's plain words, no duplicate keys, line numbers kept.

Invariant: what `scalar_text` writes, `parse` reads back as the same value. Why a dialect: PyYAML follows YAML 1.1, where
`1e-3` is a string, `010` is eight, `1:30` is ninety and `no` is false; each of these changes a run in silence.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import yaml

from rollart.core.errors import ConfigError

_WORDS: tuple[tuple[str, str, str], ...] = (
    ("null", r"^(?:~|null|Null|NULL|)$", "~nN\0"),
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF"),
    ("int", r"^[-+]?(?:0x[0-9a-fA-F]+|[0-9][0-9_]*)$", "-+0123456789"),
    ("float", r"^[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?$", "-+.0123456789"),
    ("float", r"^(?:[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$", "-+."),
)
"""Tag, pattern and possible first characters of every plain word that is not a string; the first that fits wins."""
_PLAIN = re.compile(r"^[A-Za-z0-9_./+-][A-Za-z0-9_./+ -]*(?<! )$")
"""Strings that may stand without quotes if they are not one of the words above."""


class _Loader(yaml.SafeLoader):
    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()  # type: ignore[no-untyped-call]
            raise yaml.MarkedYAMLError(problem="an alias (*name); write the value out", problem_mark=event.start_mark)
        return super().compose_node(parent, index)


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _int(text: str) -> int:
    digits = text.replace("_", "")
    return int(digits, 16) if "x" in digits else int(digits)


def _resolvers() -> None:
    for target in (_Loader, _Dumper):
        target.yaml_implicit_resolvers = {}  # of this class alone, in place of those inherited from YAML 1.1
        for tag, pattern, first in _WORDS:
            target.add_implicit_resolver(
                f"tag:yaml.org,2002:{tag}", re.compile(pattern), ["" if char == "\0" else char for char in first]
            )


_resolvers()


@dataclass(frozen=True, slots=True, kw_only=True)
class Located:
    """A value with the line that it stands on. A map's values are `Located` again."""

    value: Any
    line: int
    text: str | None = None
    """A scalar as it was written, without quotes; None for lists and maps."""


def parse(text: str, where: str) -> Located:
    """Read one YAML document. `where` names it in errors.

    Raises ConfigError for bad YAML, a key that is given twice, a key that is not a word, or an alias.
    """
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return Located(value=None, line=1)
        return _located(loader, node, where, "")
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"{where}{line}: this is not YAML: {error.problem or error}; mend that line") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{where}: this is not YAML: {error}; mend it") from error
    finally:
        loader.dispose()


def _located(loader: _Loader, node: yaml.Node, where: str, path: str) -> Located:
    line = node.start_mark.line + 1
    if isinstance(node, yaml.MappingNode):
        found: dict[str, Located] = {}
        for key_node, value_node in node.value:
            key, key_line = _key(key_node, where)
            dotted = f"{path}.{key}" if path else key
            if key in found:
                raise ConfigError(
                    f"{where}:{key_line}: {dotted} is given twice (first on line {found[key].line}); keep one of them"
                )
            found[key] = _located(loader, value_node, where, dotted)
        return Located(value=found, line=line)
    if isinstance(node, yaml.ScalarNode):
        return Located(value=_scalar(loader, node, where, path), line=line, text=node.value)
    return Located(value=_unlocated(_located_items(loader, node, where, path)), line=line)


def _located_items(loader: _Loader, node: yaml.Node, where: str, path: str) -> list[Located]:
    return [_located(loader, item, where, f"{path}[{number}]") for number, item in enumerate(node.value)]


def _unlocated(value: Any) -> Any:
    if isinstance(value, Located):
        return _unlocated(value.value)
    if isinstance(value, dict):
        return {key: _unlocated(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_unlocated(item) for item in value]
    return value


def _key(node: yaml.Node, where: str) -> tuple[str, int]:
    line = node.start_mark.line + 1
    if not isinstance(node, yaml.ScalarNode) or not node.value:
        raise ConfigError(f"{where}:{line}: a key must be a word; found {getattr(node, 'value', node)!r}")
    return str(node.value), line


def _scalar(loader: _Loader, node: yaml.ScalarNode, where: str, path: str) -> Any:
    try:
        if node.tag == "tag:yaml.org,2002:int":
            return _int(node.value)
        if node.tag == "tag:yaml.org,2002:float" and node.value[-1] not in "fFnN":  # .inf and .nan are PyYAML's
            return float(node.value.replace("_", ""))
        return loader.construct_object(node)
    except ValueError as error:
        raise ConfigError(f"{where}:{node.start_mark.line + 1}: {path}={node.value}: {error}; mend it") from error


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if _PLAIN.match(text) else '"')


_Dumper.add_representer(str, _represent_text)


def scalar_text(value: Any) -> str:
    """A value as one line of YAML: scalars plain or quoted, lists and maps in flow style."""
    text: str = yaml.dump(
        value, Dumper=_Dumper, default_flow_style=True, width=float("inf"), sort_keys=False, allow_unicode=False
    )
    return text.removesuffix("\n").removesuffix("\n...")
