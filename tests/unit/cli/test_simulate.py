"""`rollart simulate`, `compare` and `calibrate`: what they call, refuse, print and leave behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_recipe import tiny_recipe

from rollart.cli import outlook_text
from rollart.cli.main import main
from rollart.cli.outlook_text import against, compared, described, percent
from rollart.cli.work import REAL
from rollart.config.load import Resolved
from rollart.core.errors import ConfigError
from rollart.observe.log import read_events
from rollart.observe.outlook import Outlook, Pool, StepTime, outlook
from rollart.recipes.registry import resolve
from rollart.sim import launch


def found(**changes: object) -> Outlook:
    """Figures of no run."""
    made = Outlook(
        steps=3, window_s=30.0, step_s=StepTime(median=10.0, mean=10.0, p10=9.0, p90=11.0), trajectories=24,
        trajectories_per_s=0.8, trained_tokens_per_s=80.0, sampled_tokens_per_s=90.0, tokens_per_s=200.0, trajectory_s=5.0,
        trajectory={"generation": 0.6, "reset": 0.1, "env_step": 0.1, "reward": 0.0, "weights": 0.0, "waiting": 0.2},
        trainer={"training": 0.5, "weights": 0.1, "waiting": 0.4, "other": 0.0},
        pools={"h20": Pool(engines=2.0, utilisation=0.7, live=3.0, turns=100)}, trains="h800", staleness_mean=0.5,
        staleness_max=1, staleness_bound=1, bound_holds=True, waste={"stale": 0.05}, failed={}, fallback=0.0, rebuilt=0.0,
        rewards={}, costs={"h20": 2.0, "h800": 6.0}, basis=("tables of the package",), notes=(),
    )  # fmt: skip
    return replace(made, **changes)  # type: ignore[arg-type]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return tiny_recipe(tmp_path)


# --- the virtual world, through the command --------------------------------------------------------------------------


def test_a_simulation_leaves_a_runs_folder_and_the_same_seed_the_same_log(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = tmp_path / "figures.json"
    assert main(["simulate", str(recipe), "--json", str(figures)]) == 0
    printed = capsys.readouterr().out
    run = tmp_path / "runs" / "tiny"
    for what in ("step time", "throughput", "utilisation", "staleness", "waste", "cost", "simulated; rests on:"):
        assert what in printed
    names = {"config.yaml", "events.jsonl", "metrics.jsonl", "summary.json", "report.html", "timeline.json"}
    assert names <= {path.name for path in run.iterdir()}
    header, events = read_events(run / "events.jsonl")
    assert (header["clock"], header["world"]) == ("virtual", "virtual")
    told = json.loads(figures.read_text())
    from_log = outlook(events)
    assert from_log is not None
    assert told == json.loads(json.dumps({"run": "tiny", **from_log.as_json()}))
    summary = json.loads((run / "summary.json").read_text())
    assert summary["figures"] == "simulated"
    assert summary["basis"] == list(from_log.basis) != []
    page = (run / "report.html").read_text(encoding="utf-8")
    assert "<title>tiny (simulated) · rollart</title>" in page
    assert "What the figures rest on" in page
    assert page.count('<p class="kind">simulated</p>') == 8
    assert '<p class="kind">measured</p>' not in page

    assert main(["simulate", str(recipe), "name=again"]) == 0
    again = (run.parent / "again" / "events.jsonl").read_bytes()
    assert again == (run / "events.jsonl").read_bytes().replace(b'"tiny"', b'"again"')
    assert main(["simulate", str(recipe), "name=other", "seed=1"]) == 0
    assert len((run.parent / "other" / "events.jsonl").read_bytes()) != len(again)


def test_the_log_does_not_depend_on_how_python_hashes(recipe: Path, tmp_path: Path) -> None:
    """Sets of strings are walked in another order in each process, unless it is told which."""
    logs = []
    for hashed in ("1", "2"):
        words = ["simulate", str(recipe), f"output_dir={tmp_path / hashed}"]
        code = f"import sys; from rollart.cli.main import main; sys.exit(main({words!r}))"
        subprocess.run(
            [sys.executable, "-c", code], check=True, capture_output=True, env={**os.environ, "PYTHONHASHSEED": hashed}
        )
        logs.append((tmp_path / hashed / "tiny" / "events.jsonl").read_bytes())
    assert logs[0] == logs[1]


def test_the_example_of_the_manual_can_be_simulated(tmp_path: Path) -> None:
    text = (Path(__file__).parents[3] / "docs" / "simulator.md").read_text(encoding="utf-8")
    example = text.split("```yaml\n", 1)[1].split("```", 1)[0]
    path = tmp_path / "my.yaml"
    path.write_text(example, encoding="utf-8")
    prepared = launch.prepare(resolve(str(path), ["schedule.steps=1"]))
    assert not [line for line in prepared.notes if "deadlines" in line]
    assert set(prepared.devices) == {"train", "h100", "mine"}


def test_two_simulations_in_one_process_do_not_disturb_each_other(recipe: Path) -> None:
    alone = launch.predict(launch.prepare(resolve(str(recipe))))
    first, second = (launch.prepare(resolve(str(recipe), words)) for words in ((), ("seed=5",)))
    assert launch.predict(second) != alone
    assert launch.predict(first) == alone


def test_compare_lays_schedules_side_by_side(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "all.json"
    words = [
        "compare",
        "one_off",
        "areal",
        "--on",
        str(recipe),
        "--repeats",
        "2",
        "schedule.steps=2",
        "--json",
        str(path),
    ]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[0].split() == ["simulated", "one_off", "areal"]
    assert "ratio to the first" in printed
    assert " ± " in printed
    assert "areal: staleness" in printed
    assert "does not hold" in printed
    assert "simulated, 1 steps of 8 trajectories; rests on:" in printed
    kept = json.loads(path.read_text())
    assert {name: len(ones) for name, ones in kept["schedules"].items()} == {"one_off": 2, "areal": 2}
    assert kept["figures"] == "simulated"


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["simulate"], "name a recipe or a .yaml file"),
        (["simulate", "smoke"], "give --calibration FILE"),
        (["simulate", "smoke", "--calibration", "none.json"], "there is no none.json"),
        (["simulate", "{recipe}", "--calibration", "none.json"], "model.kind=shape"),
        (["simulate", "{recipe}", "cluster.pools.h20.device=H2"], "H20"),
        (["simulate", "--replay", "nowhere"], "there is no run at nowhere"),
        (["simulate", "{recipe}", "--replay", "nowhere"], "means nothing to --replay"),
        (["simulate", "--replay", "nowhere", "--overwrite"], "--overwrite means nothing to --replay"),
        (["compare", "--on", "{recipe}"], "name the schedules to compare"),
        (["compare", "synk", "--on", "{recipe}"], "'synk' is no preset; did you mean sync"),
        (["compare", "sync", "sync", "--on", "{recipe}"], "sync is named twice"),
        (["compare", "sync", "--on", "{recipe}", "--repeats", "0"], "--repeats 0: it is 1 or more"),
        (["compare", "sync", "--on", "{recipe}", "seed=x"], "sync on"),
        (["calibrate", "nowhere"], "there is no run at nowhere"),
    ],
)
def test_bad_requests_are_refused_before_anything_is_run(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert main([word.format(recipe=recipe) for word in words]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_a_run_that_exists_already_is_refused(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = tmp_path / "runs" / "tiny" / "config.yaml"
    kept.parent.mkdir(parents=True)
    kept.write_text("name: x\n")
    assert main(["simulate", str(recipe)]) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert kept.read_text() == "name: x\n"


def test_the_commands_of_the_simulator_import_neither_torch_nor_ray(recipe: Path) -> None:
    code = (
        "import sys; from rollart.cli.main import main\n"
        f"assert main(['simulate', {str(recipe)!r}]) == 0\n"
        "heavy = {'torch', 'ray', 'transformers', 'gymnasium'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


# --- what is handed on and how it is said ----------------------------------------------------------------------------


def test_a_real_recipe_is_simulated_beside_the_run_of_that_name(tmp_path: Path) -> None:
    asked: list[tuple[Path, Path | None]] = []

    def simulate(resolved: Resolved, *, folder: Path, calibration: Path | None) -> Outlook:
        asked.append((folder, calibration))
        return found()

    words = ["simulate", "smoke", f"output_dir={tmp_path}", "--calibration", "laws.json"]
    assert main(words, work=replace(REAL, simulate=simulate)) == 0
    assert asked == [(tmp_path / "smoke-simulated", Path("laws.json"))]


def test_replay_prints_prediction_measurement_and_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "smoke"
    run.mkdir()
    (run / "config.yaml").write_text("name: smoke\n")

    def replay(run_dir: Path, *, calibration: Path | None) -> tuple[Outlook, Outlook]:
        assert (run_dir, calibration) == (run, None)
        return found(trajectories_per_s=0.9), found(basis=())

    path = tmp_path / "replay.json"
    assert main(["simulate", "--replay", str(run), "--json", str(path)], work=replace(REAL, replay=replay)) == 0
    lines = {line.split("  ")[0]: line.split() for line in capsys.readouterr().out.splitlines()}
    assert lines["trajectories/s"][-4:] == ["0.9", "0.8", "+12.5", "%"]
    assert lines["trainer: waiting"][-2:] == ["+0.0", "points"]
    kept = json.loads(path.read_text())
    assert (kept["predicted"]["figures"], kept["measured"]["figures"]) == ("simulated", "measured")


def test_calibrate_writes_where_it_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "smoke"
    run.mkdir()
    (run / "config.yaml").write_text("name: smoke\n")
    asked: list[tuple[Path, Path]] = []

    def calibrate(run_dir: Path, out: Path) -> list[str]:
        asked.append((run_dir, out))
        return ["engine: fitted"]

    for words, out in (([], run / "calibration.json"), (["--out", str(tmp_path / "c.json")], tmp_path / "c.json")):
        assert main(["calibrate", str(run), *words], work=replace(REAL, calibrate=calibrate)) == 0
        assert asked[-1] == (run, out)
        assert capsys.readouterr().out == f"engine: fitted\n{out}\n"


def test_everything_that_was_asked_for_is_printed() -> None:
    text = described("plan", found(notes=("a note",), failed={"env/timeout": 0.01}, fallback=0.2))
    for what in (
        "plan: simulated", "10 s median", "0.8 trajectories/s", "generation 60 %", "waiting 40 %", "h20 70 % (2 engines",
        "h800 trains 50 %", "0.50 mean, 1 at most, bound 1", "5 % of the tokens trained or dropped: stale 5 %",
        "env/timeout 0.01", "20 % of the turns", "8 H20 hours per 1,000 trajectories: h20 2, h800 6", "tables of the package",
        "a note",
    ):  # fmt: skip
        assert what in text
    assert "measured" in described("real", found(basis=()))


def test_a_bound_that_does_not_hold_is_told_wherever_staleness_is() -> None:
    assert "bound of 1 does not hold" in outlook_text.staleness(found(bound_holds=False, staleness_max=7))
    assert "does not hold" not in outlook_text.staleness(found())


def test_a_table_of_schedules_has_ratios_spreads_and_no_empty_lines() -> None:
    text = compared({"a": [found()], "b": [found(trajectories_per_s=1.6), found(trajectories_per_s=1.2)]})
    lines = {line[:24].strip(): line for line in text.splitlines()}
    assert lines["ratio to the first"].split()[-2:] == ["1.00", "1.75"]
    assert lines["trajectories/s"].endswith("1.4 ± 0.2828")
    assert "trajectory: reward" not in lines
    assert "utilisation of h20" in lines
    assert "utilisation of h800" not in lines, "the trainer's share of training is no use of engines"
    assert "trainer: training" in lines


@pytest.mark.parametrize(
    ("share", "said"), [(0.0, "0 %"), (1e-6, "0 %"), (0.0123, "1.2 %"), (0.099, "9.9 %"), (0.5, "50 %"), (1.0, "100 %")]
)
def test_shares_are_short(share: float, said: str) -> None:
    assert percent(share) == said


def test_against_leaves_out_what_neither_has() -> None:
    text = against(found(costs={}), found(basis=(), costs={}))
    assert "H20 hours" not in text
    assert "step time, median" in text


def test_a_schedule_that_cannot_be_is_refused_before_the_first_is_run(recipe: Path) -> None:
    ran: list[Outlook] = []
    fits, not_ = (resolve(str(recipe), words) for words in ((), ("cluster.pools.h20.device=H2",)))
    with pytest.raises(ConfigError, match="H20"):
        REAL.predict([fits, not_], ran.append)
    assert ran == []
