"""What every part of the configuration is built on. See `schema.py` for the whole.

A rule within a part names a key of that part (`side=5: ..`), a rule across parts its whole dotted name; loading adds the
rest.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Node(BaseModel):
    """A part of the configuration: unknown keys are refused, values are frozen."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True, protected_namespaces=()
    )


def refuse(*problems: str | None) -> None:
    """Raise ValueError with one line per problem; None stands for a rule that holds."""
    lines = [problem for problem in problems if problem]
    if lines:
        raise ValueError("\n".join(lines))
