"""What a capture needs of the process that it runs in."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(autouse=True)
def _no_group_is_left() -> None:
    """Trainers that ran in this process before leave their group of one rank; under one nothing is captured."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
        gc.collect()
