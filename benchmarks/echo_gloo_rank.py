"""One process of `echo_gloo.py`, started by `echo_gloo_ranks.ranks`: TASK FOLDER RANK CORE.

Reads FOLDER/spec.json, writes FOLDER/RANK.json. Tasks of a group meet in FOLDER/store; `operators` and `host` are done by each
process alone, whatever runs beside it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed import FileStore  # type: ignore[attr-defined]

import echo_gloo_collectives
import echo_gloo_profile
import echo_gloo_step
from rollart.runtime.trainer import ranks

TIMEOUT_S = 120.0
Task = Callable[[Mapping[str, Any], int], dict[str, Any]]
TOGETHER: dict[str, Task] = {"steps": echo_gloo_step.measured, "collectives": echo_gloo_collectives.measured}
ALONE: dict[str, Task] = {"operators": echo_gloo_profile.operators}


def main() -> int:
    task, where, rank_word, core = sys.argv[1:]
    folder, rank = Path(where), int(rank_word)
    os.sched_setaffinity(0, {int(core)})
    torch.set_num_threads(1)
    spec = json.loads((folder / "spec.json").read_text(encoding="utf-8"))
    if task in ALONE:
        found = ALONE[task](spec, rank)
    else:
        store = FileStore(str(folder / "store"), spec["world"])
        ranks.join(rank, spec["world"], store, TIMEOUT_S)
        found = TOGETHER[task](spec, rank)
        ranks.leave()
    (folder / f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
