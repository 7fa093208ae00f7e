"""Environments and the hosts that run them. Users write against `rollart.runtime.envs.text`."""

from rollart.runtime.envs.text import StepResult, TextEnv, TextTask

__all__ = ["StepResult", "TextEnv", "TextTask"]
