"""Settings that all tests share. Properties draw the same examples in every run, and no test is judged by its time."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("rollart", deadline=None, derandomize=True, database=None)
settings.load_profile("rollart")
