"""Limits that no linter has: the size of files and functions, documented seams, and what may be imported where."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"
TESTS = ROOT / "tests"
FILE_LINES_MAX = 500
FUNCTION_LINES_MAX = 60
"""Docstring not counted."""
REGISTRY_HOSTS = ("py" + "pi.org", "python" + "hosted")

Function = ast.FunctionDef | ast.AsyncFunctionDef


def trees(*folders: Path) -> Iterator[tuple[Path, ast.Module]]:
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            yield path.relative_to(ROOT), ast.parse(path.read_text())


def body_lines(function: Function) -> int:
    first = function.body[0]
    documented = ast.get_docstring(function, clean=False) is not None
    docstring = first.end_lineno - first.lineno + 1 if documented else 0
    return function.end_lineno - function.lineno + 1 - docstring


def test_files_are_short():
    """A file is read in one sitting."""
    lengths = {path: len((ROOT / path).read_text().splitlines()) for path, _ in trees(SOURCE, TESTS)}
    assert not {str(path): num for path, num in lengths.items() if num > FILE_LINES_MAX}


def test_functions_are_short():
    """A function fits on one screen."""
    assert not {
        f"{path}:{node.lineno} {node.name}": lines
        for path, tree in trees(SOURCE, TESTS)
        for node in ast.walk(tree)
        if isinstance(node, Function) and (lines := body_lines(node)) > FUNCTION_LINES_MAX
    }


def test_seams_are_documented():
    """People read a Protocol to write its other side, so every method explains itself."""
    assert not [
        f"{path}:{method.lineno} {cls.name}.{method.name}"
        for path, tree in trees(SOURCE)
        for cls in ast.walk(tree)
        if isinstance(cls, ast.ClassDef) and any(ast.unparse(base) == "Protocol" for base in cls.bases)
        for method in cls.body
        if isinstance(method, Function) and ast.get_docstring(method) is None
    ]


def test_every_test_states_its_law():
    """A test without a first line is an example of nothing."""
    folders = [TESTS / name for name in ("unit", "contract", "simulation", "e2e", "tidy", "packaging")]
    assert not [
        f"{path}:{node.lineno} {node.name}"
        for path, tree in trees(*folders)
        for node in ast.walk(tree)
        if isinstance(node, Function) and node.name.startswith("test_") and ast.get_docstring(node) is None
    ]


def test_nobody_sleeps():
    """Waiting is for a condition, with a deadline."""
    call = "time." + "sleep("
    assert not [str(path) for path, _ in trees(SOURCE, TESTS) if call in (ROOT / path).read_text()]


@pytest.mark.parametrize("module", ["pickle", "marshal", "shelve", "dill", "cloudpickle"])
def test_nothing_that_runs_what_it_reads(module: str):
    """No module that turns bytes from a peer or a file into code or objects of any kind."""
    assert not [
        f"{path}:{node.lineno}"
        for path, tree in trees(SOURCE)
        for node in ast.walk(tree)
        if (isinstance(node, ast.Import) and module in {name.name.split(".")[0] for name in node.names})
        or (isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == module)
    ]


def test_no_package_registry_is_named():
    """Where packages come from is the business of whoever installs them."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    found = []
    for name in filter(None, listed.stdout.decode().split("\0")):
        path = ROOT / name
        text = path.read_bytes().decode("utf-8", "replace").lower() if path.is_file() else ""
        found += [f"{name}: {host}" for host in REGISTRY_HOSTS if host in text]
    assert not found


def test_the_daemon_does_not_depend_on_torch():
    """Neither what the daemon nor what an engine's side needs names an ML framework."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = project["dependencies"] + project["optional-dependencies"]["server"]
    assert not [line for line in needed if line.split(">")[0].split("[")[0].strip() in ("torch", "vllm", "sglang")]


def imported_by(module: str) -> set[str]:
    """Return the top-level modules that a fresh interpreter has loaded after importing ``module``."""
    program = f"import sys; before = set(sys.modules); import {module}; print(*(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return {name.split(".")[0] for name in done.stdout.split()}


def test_the_client_needs_little():
    """What an engine loads is this package, msgspec and numpy, with what these two load, and nothing else."""
    allowed = imported_by("msgspec, numpy") | set(sys.stdlib_module_names) | {"kvist"}
    assert imported_by("kvist.client.client") - allowed == set()
    assert "torch" not in allowed


def test_the_plugin_needs_nothing():
    """What vLLM loads in each of its processes, connector or not, is this package and the standard library."""
    assert imported_by("kvist.adapters.vllm.plugin") - set(sys.stdlib_module_names) == {"kvist"}


def test_the_daemon_runs_without_torch():
    """The daemon starts in an environment that has no ML framework, and loads none where there is one."""
    loaded = imported_by("kvist.server.daemon")
    assert "kvist" in loaded
    assert loaded.isdisjoint({"torch", "vllm", "sglang", "transformers"})


def test_the_program_runs_without_an_engine():
    """Also where it reads an engine's options."""
    loaded = imported_by("kvist.cli.main, kvist.adapters.vllm.options")
    assert "kvist" in loaded
    assert loaded.isdisjoint({"torch", "vllm", "sglang", "transformers"})


def test_the_daemon_runs_without_a_web_framework():
    """HTTP is another process's: neither the daemon nor the command that starts it loads what answers it."""
    assert imported_by("kvist.cli.main").isdisjoint({"starlette", "uvicorn", "h11", "anyio", "prometheus_client"})


def test_importing_does_nothing():
    """The package by itself reads no environment, finds no device and loads nothing but the standard library."""
    assert imported_by("kvist") - set(sys.stdlib_module_names) == {"kvist"}


def test_the_page_on_faults_names_tests_that_exist():
    """What is said to hold a fault off is there: every test and every path of the page."""
    named = set(re.findall(r"`(tests/[\w/]+\.py|test_\w+)`", (ROOT / "docs" / "faults.md").read_text()))
    functions = {node.name for _, tree in trees(TESTS) for node in ast.walk(tree) if isinstance(node, Function)}
    assert len(named) > 100
    assert not [name for name in named if name not in functions and not (ROOT / name).is_file()]
