"""A module whose forward asks for a value, as a user's may: what a trace of it holds for depends on the answer."""

from __future__ import annotations

import torch


class Reads(torch.nn.Module):
    """One layer, and another pass where its outputs are large."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (tokens, 64); a number."""
        y: torch.Tensor = self.inner(x)
        if y.abs().mean().item() > 1.0:
            y = torch.tanh(y)
        return y.sum()


def build() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """The module and its inputs."""
    return Reads(), (torch.randn(8, 64),)
