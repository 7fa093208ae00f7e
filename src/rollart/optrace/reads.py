"""Host code that reads a value of a tensor while a step is captured, and the assumption under which the trace holds.

Owns the answers to such reads. Invariant: a value that fake tensors do not have is never made up: it comes from an assumption
that is stated, by the user for a line of their code or by this package for its own step, or the capture ends with the line
that asked. Why: control flow that depends on what other ranks computed makes a trace of one rank worthless without a word.
Imports torch: import this module inside functions.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._ops import OpOverload

from rollart.core.errors import ConfigError
from rollart.optrace.ops import HostRead

aten = torch.ops.aten
VALUE_READS = frozenset({aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default})
COUNT_READS = frozenset({aten.nonzero.default, aten.masked_select.default})
"""Their results have as many rows as values are true, which the host waits for."""
LIBRARIES = ("/torch/", "/transformers/", "/rollart/optrace/", "<frozen ", "/contextlib.py", "/functools.py")


class Reads:
    """Answers reads from `assume` (line or file of the reading code -> value) and notes them."""

    def __init__(self, assume: Mapping[str, str]) -> None:
        self.assume = dict(assume)
        self.noted: dict[str, HostRead] = {}
        self.used: set[str] = set()
        self._given: list[Any] = []

    @contextmanager
    def given(self, value: Any, *, where: str = "", assumption: str = "") -> Iterator[None]:
        """Reads inside are answered by `value`; noted if they are reads of what other ranks had a say in (`where`)."""
        if where:
            self.note(where, assumption)
        self._given.append(value)
        try:
            yield
        finally:
            self._given.pop()

    def note(self, where: str, assumption: str) -> None:
        """A place where work depends on values without a read of the host."""
        self.noted.setdefault(where, HostRead(where=where, assumption=assumption))

    def answer(
        self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], remote: bool
    ) -> tuple[bool, Any]:
        """(whether the call was answered, its result). Raises `ConfigError` for a read without an assumption."""
        if func not in VALUE_READS and func not in COUNT_READS:
            return False, None
        tensor = args[0]
        if getattr(tensor, "constant", None) is not None:
            return False, None  # a constant of the program, which fake tensors know
        if self._given:
            return True, self._given[-1]
        path, place, line = _asker(func)
        found = next((key for key in self.assume if _fits(key, path, place)), None)
        if found is None:
            whose = (
                "what other ranks computed"
                if remote
                else "a computed value, which a capture without data does not have"
            )
            what = "the number of true values" if func in COUNT_READS else "a value"
            raise ConfigError(
                f"{line} reads {what} of a tensor on the host; it depends on {whose}. State what to assume, for instance "
                f"--assume {place}=1, or keep it on the device"
            )
        self.used.add(found)
        self.note(line, f"{found} = {self.assume[found]}, as assumed by the user")
        number = _number(found, self.assume[found])
        if func is aten._local_scalar_dense.default:
            return True, _cast(number, tensor.dtype)
        if func in VALUE_READS:
            return True, bool(number)
        rows = _rows(found, number, args)
        shape = (rows, tensor.dim()) if func is aten.nonzero.default else (rows,)
        dtype = torch.int64 if func is aten.nonzero.default else tensor.dtype
        return True, torch.empty(shape, dtype=dtype, device=tensor.device)

    def unused(self) -> tuple[str, ...]:
        """Assumptions that no read asked for."""
        return tuple(sorted(set(self.assume) - self.used))


def no_answer(func: OpOverload) -> ConfigError:
    """The error for an operator that has no result without data, and for which no assumption can stand in."""
    line = _asker(func)[2]
    return ConfigError(
        f"{line}: what {func.overloadpacket!s} gives depends on the values of its operands, which a capture does not have; "
        "take an operator whose result has a shape of its own, or leave this part of the model out"
    )


def _cast(number: float, dtype: torch.dtype) -> bool | int | float:
    if dtype is torch.bool:
        return bool(number)
    return number if dtype.is_floating_point else int(number)


def _fits(key: str, path: str, place: str) -> bool:
    """Whether an assumption names the file of a read, with as much of its path as it gives, or its line there."""
    file, colon, number = key.rpartition(":")
    named = file if colon and number == place.rpartition(":")[2] else key
    return path == named or path.endswith("/" + named)


def _number(key: str, text: str) -> float:
    words = {"true": 1.0, "false": 0.0}
    try:
        found = words[text.lower()] if text.lower() in words else float(text)
    except ValueError:
        found = math.nan
    if not math.isfinite(found):
        raise ConfigError(f"assumption {key}={text!r} is no value; give a finite number, true or false")
    return found


def _rows(key: str, number: float, args: Sequence[Any]) -> int:
    """How many values are assumed to be true, of those that there are."""
    shapes = (one.shape for one in args if isinstance(one, torch.Tensor))
    most = math.prod(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]
    if number != int(number) or not 0 <= number <= most:
        near = round(min(max(number, 0), most))
        raise ConfigError(f"assumption {key}={number:g}: it counts true values of {most}; the nearest is {near}")
    return int(number)


def line_of(problem: BaseException) -> str:
    """`file:line` of the innermost frame of an error that is the user's, else of a library."""
    frames = traceback.extract_tb(problem.__traceback__)
    own = [frame for frame in frames if not any(part in frame.filename for part in LIBRARIES)]
    chosen = (own or frames)[-1]
    return f"{chosen.filename.rsplit('/', 1)[-1]}:{chosen.lineno}"


def _asker(func: OpOverload) -> tuple[str, str, str]:
    """(path, file:line, the same with operator and code) of the innermost frame that is the user's, else of a library."""
    frames = [frame for frame in traceback.extract_stack() if not frame.filename.startswith("<")]
    own = [frame for frame in frames if not any(part in frame.filename for part in LIBRARIES)]
    inside = [
        frame for frame in frames if "/torch/" not in frame.filename and "/rollart/optrace/re" not in frame.filename
    ]
    mine = [frame for frame in own if _under_capture(frames, frame)]
    chosen = (mine or inside or frames)[-1]
    name = chosen.filename.rsplit("/", 1)[-1]
    place = f"{name}:{chosen.lineno}"
    return chosen.filename, place, f"{place} ({func.overloadpacket!s}: {(chosen.line or '').strip()[:80]})"


def _under_capture(frames: Sequence[traceback.FrameSummary], frame: traceback.FrameSummary) -> bool:
    """Whether a frame was called by the capture, rather than calling it."""
    started = max((i for i, f in enumerate(frames) if f.filename.endswith("/optrace/live_step.py")), default=-1)
    return frames.index(frame) > started
