"""Typed configurations made from other typed configurations.

Invariant: the result is checked like one written out, and what neither sets stays a default.
"""

from __future__ import annotations

from typing import Any, TypeVar

from rollart.config.schema import Node

N = TypeVar("N", bound=Node)


def changed(node: N, **fields: Any) -> N:
    """`node` with some fields set otherwise. Raises pydantic's ValidationError like the constructor does."""
    kept = {name: getattr(node, name) for name in type(node).model_fields if name in node.model_fields_set}
    return type(node)(**(kept | fields))
