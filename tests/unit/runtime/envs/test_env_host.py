"""One process with many sessions: one bad environment costs itself only, and every call is answered once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from urllib.request import urlopen

import pytest

from rollart.config.schema import CharsTokenizer, EnvHostConfig, PythonScorer, TaskConfig
from rollart.core.types import Failure, Observation
from rollart.runtime.envs.host import Call, Close, Done, EnvHost, Open, Reset, Score, Step
from rollart.runtime.envs.session import TurnText
from rollart.runtime.envs.text import StepResult
from rollart.runtime.tokenizers import build_tokenizer

WAIT_S = 20.0
"""Budget of calls that must succeed, and longest wait of a test; never waited out when things work."""
SHORT_S = 0.1
"""Budget of calls that must time out."""
TOKENIZER = build_tokenizer(CharsTokenizer())


class Obedient:
    """Does what the action says: waits for the gate, raises, leaves, returns NaN; anything else is echoed."""

    gate = threading.Event()
    entered = threading.Semaphore(0)
    closed = threading.Semaphore(0)
    steps: list[str]
    """Actions of all sessions since the test began."""

    def reset(self, seed: int) -> str:
        return f"seed {seed}\n"

    def step(self, action: str) -> StepResult:
        Obedient.steps.append(action)
        if action == "wait":
            Obedient.entered.release()
            Obedient.gate.wait(WAIT_S)
        if action == "raise":
            raise RuntimeError("the door is stuck")
        if action == "leave":
            raise SystemExit(2)
        return StepResult(f"{action}\n", reward=float("nan") if action == "nan" else 1.0)

    def close(self) -> None:
        Obedient.closed.release()


class NeverBuilt:
    def __init__(self) -> None:
        raise OSError("no sandbox left")


def scorer(text: str, metrics: Mapping[str, float], *, url: str = "", how: str = "") -> float:
    """A user's scorer: asks a server, or misbehaves as told."""
    if how == "wait":
        Obedient.gate.wait(WAIT_S)
    if how == "nan":
        return float("nan")
    if how == "none":
        return None  # type: ignore[return-value]
    if url:
        with urlopen(url) as answer:
            return float(answer.read())
    return len(text) + metrics["bonus"]


def scored(**kwargs: object) -> TaskConfig:
    return python("Obedient").model_copy(
        update={"scorer": PythonScorer(kind="python", entry=f"{__name__}:scorer", kwargs=dict(kwargs))}
    )


def python(name: str) -> TaskConfig:
    return TaskConfig.model_validate({"env": {"kind": "python", "entry": f"{__name__}:{name}"}})


class Driver:
    """A host and its owner's side: submits calls and collects answers."""

    def __init__(self, tasks: Mapping[str, TaskConfig], **config: int) -> None:
        self.ready = threading.Event()
        self.host = EnvHost(tasks, TOKENIZER, EnvHostConfig(**config), wake=self.ready.set)
        self.seq = 0

    def collect(self, n: int) -> dict[str, Done]:
        """The next `n` answers, by session."""
        done: list[Done] = []
        while len(done) < n:
            assert self.ready.wait(WAIT_S), f"{len(done)} of {n} answers came"
            self.ready.clear()
            done += self.host.take()
        assert len(done) == n
        return {each.session: each for each in done}

    def ask(self, *calls: Call) -> dict[str, Done]:
        self.host.submit(calls)
        return self.collect(len(calls))

    def step(self, session: str, action: str, budget_s: float = WAIT_S) -> Step:
        self.seq += 1
        return Step(session=session, seq=self.seq, budget_s=budget_s, ids=TOKENIZER.encode(action + "\n"))

    def begin(self, *sessions: str, task: str = "t") -> None:
        """Open and reset; both must succeed."""
        self.seq += 2
        opened = self.ask(*(Open(session=s, seq=self.seq - 1, budget_s=WAIT_S, task=task) for s in sessions))
        assert [done.result for done in opened.values()] == [None] * len(sessions)
        reset = self.ask(*(Reset(session=s, seq=self.seq, budget_s=WAIT_S, seed=7, chance_seed=0) for s in sessions))
        assert all(isinstance(done.result, Observation) for done in reset.values())

    def close(self, session: str) -> None:
        self.seq += 1
        assert self.ask(Close(session=session, seq=self.seq, budget_s=WAIT_S))[session].result is None


@pytest.fixture
def drive() -> Iterator[Callable[..., Driver]]:
    Obedient.gate = threading.Event()
    Obedient.entered = threading.Semaphore(0)
    Obedient.closed = threading.Semaphore(0)
    Obedient.steps = []
    drivers: list[Driver] = []

    def make(tasks: Mapping[str, TaskConfig] | None = None, **config: int) -> Driver:
        drivers.append(Driver(tasks or {"t": python("Obedient")}, **config))
        return drivers[-1]

    yield make
    Obedient.gate.set()
    for driver in drivers:
        driver.host.close()


def reply(done: Done) -> str:
    assert isinstance(done.result, Observation), done.result
    assert isinstance(done.result.evidence, TurnText)
    return done.result.evidence.reply


def failed(done: Done) -> Failure:
    assert isinstance(done.result, Failure), done.result
    return done.result


def test_one_of_eight_environments_never_returns_and_the_others_go_on(drive: Callable[..., Driver]) -> None:
    """Field case 1: at the host."""
    driver = drive()
    names = [str(n) for n in range(8)]
    driver.begin(*names)
    answers = driver.ask(
        *(driver.step(n, "wait" if n == "3" else "go", SHORT_S if n == "3" else WAIT_S) for n in names)
    )
    stuck = failed(answers.pop("3"))
    assert (stuck.where, stuck.kind, stuck.retryable) == ("env", "timeout", True)
    assert stuck.detail == "step ran longer than 0.1 s"
    assert [reply(done) for done in answers.values()] == ["go\n"] * 7
    again = driver.ask(*(driver.step(n, "on") for n in names))
    dead = failed(again.pop("3"))
    assert (dead.kind, dead.detail) == ("refused", "step: the session is dead (step ran longer than 0.1 s)")
    assert [reply(done) for done in again.values()] == ["on\n"] * 7
    facts = driver.host.facts()
    assert (facts.hung, facts.failures) == (1, {"env timeout": 1, "env refused": 1})


def test_what_an_abandoned_call_returns_is_ignored_and_its_environment_closed(drive: Callable[..., Driver]) -> None:
    """Field case 29: at the host, the late result of a session that was given up reaches nobody."""
    driver = drive(sessions_per_host=1)
    driver.begin("a")
    assert failed(driver.ask(driver.step("a", "wait", SHORT_S))["a"]).kind == "timeout"
    driver.close("a")
    facts = driver.host.facts()
    assert (facts.sessions, facts.held, facts.hung) == (0, 1, 1)
    refused = failed(driver.ask(Open(session="b", seq=0, budget_s=WAIT_S, task="t"))["b"])
    assert refused.kind == "refused"
    assert "all 1 sessions are taken (1 of them by hung or closing environments)" in refused.detail
    Obedient.gate.set()
    assert Obedient.closed.acquire(timeout=WAIT_S)
    driver.host.close()
    assert driver.host.take() == []
    facts = driver.host.facts()
    assert (facts.held, facts.hung) == (0, 0)


def test_a_call_that_arrives_twice_is_done_once(drive: Callable[..., Driver]) -> None:
    """Field case 29: at the host, duplicates while running and after the answer."""
    driver = drive()
    driver.begin("a")
    Obedient.gate.set()
    step = driver.step("a", "wait")
    driver.host.submit([step, step])
    assert reply(driver.collect(1)["a"]) == "wait\n"
    driver.host.submit([step])
    assert reply(driver.ask(driver.step("a", "next"))["a"]) == "next\n"
    assert Obedient.steps == ["wait", "next"]
    assert driver.host.facts().duplicates == 2


@pytest.mark.parametrize(
    ("action", "detail"),
    [
        ("raise", "RuntimeError: the door is stuck (test_env_host.py:"),
        ("leave", "SystemExit: 2 (test_env_host.py:"),
        ("nan", "rollart.core.errors.EnvError: step gave the reward nan; a reward is finite (session.py:"),
    ],
)
def test_an_environment_that_raises_is_counted_by_type_and_the_others_go_on(
    drive: Callable[..., Driver], action: str, detail: str
) -> None:
    """Field case 26: at the host."""
    driver = drive()
    names = [str(n) for n in range(4)]
    driver.begin(*names)
    answers = driver.ask(*(driver.step(n, action if n == "2" else "go") for n in names))
    bad = failed(answers.pop("2"))
    assert (bad.where, bad.kind, bad.retryable) == ("env", "raised", action != "nan")
    assert bad.detail.startswith(detail)
    assert [reply(done) for done in answers.values()] == ["go\n"] * 3
    assert driver.host.facts().failures == {"env raised": 1}
    for name in names:
        driver.close(name)
        assert Obedient.closed.acquire(timeout=WAIT_S)


def test_an_environment_that_cannot_be_built_is_a_failure_to_open(drive: Callable[..., Driver]) -> None:
    driver = drive({"t": python("NeverBuilt")}, sessions_per_host=1)
    for name in ("a", "b"):
        failure = failed(driver.ask(Open(session=name, seq=0, budget_s=WAIT_S, task="t"))[name])
        assert failure.detail.startswith("OSError: no sandbox left (test_env_host.py:")
        driver.close(name)


def test_what_cannot_be_taken_is_refused_with_the_reason(drive: Callable[..., Driver]) -> None:
    driver = drive(sessions_per_host=1)
    driver.begin("a")
    why = [
        failed(driver.ask(call)[call.session]).detail
        for call in (
            Open(session="b", seq=0, budget_s=WAIT_S, task="t"),
            Open(session="c", seq=0, budget_s=WAIT_S, task="no_such"),
            Open(session="a", seq=99, budget_s=WAIT_S, task="t"),
            Step(session="d", seq=0, budget_s=WAIT_S, ids=TOKENIZER.encode("go")),
        )
    ]
    assert why == [
        "open: all 1 sessions are taken (0 of them by hung or closing environments); raise envs.sessions_per_host or "
        "envs.hosts",
        "open: task 'no_such' is not known here",
        "open: session 'a' is open already",
        "step: no session 'd' is open on this host",
    ]
    assert driver.host.facts().failures == {"env refused": 4}
    driver.close("a")
    driver.begin("b")


def test_a_second_call_while_one_runs_is_refused_and_close_waits_for_nobody(drive: Callable[..., Driver]) -> None:
    driver = drive()
    driver.begin("a")
    driver.host.submit([driver.step("a", "wait")])
    assert Obedient.entered.acquire(timeout=WAIT_S)
    second = failed(driver.ask(driver.step("a", "go"))["a"])
    assert (second.kind, second.detail) == ("refused", "step: another call of it is running")
    driver.close("a")
    assert not Obedient.closed.acquire(blocking=False)
    Obedient.gate.set()
    assert Obedient.closed.acquire(timeout=WAIT_S)
    assert reply(driver.collect(1)["a"]) == "wait\n"


def test_closing_twice_or_without_opening_is_harmless(drive: Callable[..., Driver]) -> None:
    driver = drive()
    driver.close("never")
    driver.begin("a")
    driver.close("a")
    driver.close("a")
    assert Obedient.closed.acquire(timeout=WAIT_S)
    assert not Obedient.closed.acquire(blocking=False)


def test_closing_the_host_closes_every_environment_that_nobody_is_in(drive: Callable[..., Driver]) -> None:
    driver = drive()
    driver.begin("a", "b", "c")
    driver.host.submit([driver.step("c", "wait")])
    assert Obedient.entered.acquire(timeout=WAIT_S)
    driver.host.close(budget_s=SHORT_S)
    assert all(Obedient.closed.acquire(blocking=False) for _ in "ab")
    assert not Obedient.closed.acquire(blocking=False)
    assert failed(driver.collect(1)["c"]).kind == "lost"


def score(session: str = "s", budget_s: float = WAIT_S) -> Score:
    return Score(session=session, seq=0, task="t", text="abc", metrics={"bonus": 0.5}, budget_s=budget_s)


def test_a_scorer_gives_the_reward_without_an_open_session(drive: Callable[..., Driver]) -> None:
    driver = drive({"t": scored()})
    assert driver.ask(score())["s"].result == 3.5


def test_a_scorer_whose_server_answers_500_leaves_the_sample_unscored(drive: Callable[..., Driver]) -> None:
    """Field case 31: at the host."""

    class Broken(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(500)

        def log_message(self, format: str, *args: object) -> None:
            return

    with HTTPServer(("127.0.0.1", 0), Broken) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        driver = drive({"t": scored(url=f"http://127.0.0.1:{server.server_port}/")})
        got = failed(driver.ask(score())["s"])
        server.shutdown()
        thread.join()
    assert (got.where, got.kind, got.retryable) == ("scorer", "raised", True)
    assert got.detail.startswith("urllib.error.HTTPError: HTTP Error 500: Internal Server Error")
    assert driver.host.facts().failures == {"scorer raised": 1}


@pytest.mark.parametrize(("how", "kind"), [("nan", "not_finite"), ("none", "raised"), ("wait", "timeout")])
def test_a_scorer_that_gives_no_number_is_a_failure_and_never_0(
    drive: Callable[..., Driver], how: str, kind: str
) -> None:
    driver = drive({"t": scored(how=how)}, score_concurrency=2)
    got = failed(driver.ask(score(budget_s=SHORT_S if how == "wait" else WAIT_S))["s"])
    assert (got.where, got.kind) == ("scorer", kind)
    Obedient.gate.set()


def test_a_hung_scorer_holds_up_no_environment(drive: Callable[..., Driver]) -> None:
    driver = drive({"t": scored(how="wait")}, score_concurrency=1)
    driver.host.submit([score("s1"), score("s1"), score("s2")])
    driver.begin("a")
    assert reply(driver.ask(driver.step("a", "go"))["a"]) == "go\n"
    Obedient.gate.set()
    assert {name: done.result for name, done in driver.collect(2).items()} == {"s1": 3.5, "s2": 3.5}
    assert driver.host.facts().duplicates == 1
