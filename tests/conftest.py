"""Settings that all tests share. Properties draw the same examples in every run, and no test is judged by its time."""

from __future__ import annotations

import gc

import pytest
from hypothesis import settings

settings.register_profile("rollart", deadline=None, derandomize=True, database=None)
settings.load_profile("rollart")


@pytest.fixture(autouse=True)
def _no_group_is_left(request: pytest.FixtureRequest) -> None:
    """Trainers that ran in this process before leave their group of one rank; under one no step is captured."""
    if "optrace" not in request.path.parts:
        return
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
        gc.collect()
