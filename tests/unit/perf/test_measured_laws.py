"""Laws on disk: what was written is read back, and what is not a calibration is refused with its place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from measured_laws import some_laws
from rollart.core.errors import ConfigError
from rollart.perf.measured import load


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    laws = some_laws()
    laws.save(tmp_path / "laws.json")
    assert load(tmp_path / "laws.json") == laws


@pytest.mark.parametrize(
    ("place", "value", "told"),
    [
        (("engine", "step_s"), "fast", "engine.step_s='fast' is not a finite number"),
        (("engine", "step_s"), float("nan"), "engine.step_s=nan is not a finite number"),
        (("trainer", "token_s"), -1.0, "trainer.token_s=-1.0 is below 0"),
        (("host", "colour"), 1, "host.colour is not known"),
        (("format",), 0, "has format 0"),
        (("format",), 2, "has format 2, this version reads 3"),
    ],
)
def test_a_value_that_cannot_be_is_refused_with_its_place(
    tmp_path: Path, place: tuple[str, ...], value: object, told: str
) -> None:
    path = tmp_path / "laws.json"
    some_laws().save(path)
    found = json.loads(path.read_text())
    inner = found
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = value
    path.write_text(json.dumps(found))
    with pytest.raises(ConfigError, match="rollart calibrate RUN") as refused:
        load(path)
    assert told in str(refused.value)


def test_a_file_that_is_not_there_or_no_map_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no"):
        load(tmp_path / "none.json")
    (tmp_path / "list.json").write_text("[1]")
    with pytest.raises(ConfigError, match="format"):
        load(tmp_path / "list.json")
