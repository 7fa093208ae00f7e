"""A whole run that samples in vLLM, through the command line."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from rollart.observe.log import read_events

ROLLART = Path(sys.executable).with_name("rollart")
PYTHON = Path(__file__).parents[2] / ".venv-vllm" / "bin" / "python"
WORDS = [
    "model.hidden=64 optimizer.weight_decay=0.1",
    f"engine.kind=vllm engine.python={PYTHON} engine.start_s=500 deadlines.start_s=600",
    "schedule.steps=2 schedule.batch=8 schedule.group_size=4",
    "baselines.episodes=4 warm_start.steps=1 warm_start.episodes=8 eval.episodes=8",
]


def of_another(path: Path) -> bool:
    """Whether a process that lives has it: of another run on this machine, for this one's are gone."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (process / "cmdline").read_bytes() + (process / "maps").read_bytes()
            if path.name.encode() in words:
                return True
    return False


@pytest.mark.vllm
@pytest.mark.ray
@pytest.mark.skipif(not PYTHON.exists(), reason="vLLM is not installed: `make vllm` makes .venv-vllm")
def test_a_run_trains_on_what_vllm_sampled_and_leaves_nothing(tmp_path: Path) -> None:
    before = set(Path("/dev/shm").iterdir())
    words = [word for line in WORDS for word in line.split()]
    command = [str(ROLLART), "train", "smoke", "--plain", f"output_dir={tmp_path}", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    events = list(read_events(tmp_path / "smoke" / "events.jsonl")[1])
    applied = [event for event in events if event["kind"] == "applied"]
    assert [event["version"] for event in applied][-1] == 2
    assert all(event["data"]["matches"] for event in applied)
    assert len({event["data"]["digest"] for event in applied}) == len(applied) > 1
    left = {path for path in set(Path("/dev/shm").iterdir()) - before if path.name.startswith(("rollart", "psm_"))}
    assert not {path for path in left if path.exists() and not of_another(path)}
