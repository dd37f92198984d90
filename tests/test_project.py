"""The project as a whole: its floors, imports, public names, binaries and commands."""

import ast
import importlib
import pathlib
import re
import subprocess
import sys
import tomllib

import pytest

import experiments
import stackalign

ROOT = pathlib.Path(__file__).resolve().parent.parent
SOURCES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for package in (stackalign, experiments)
    for path in sorted(pathlib.Path(package.__path__[0]).rglob("*.py"))
}
BINARIES = [name for name, path in SOURCES.items() if "app.run(" in path.read_text()]
ROOMS = [path.parent.name for path in sorted((ROOT / "stackalign").glob("*/__init__.py"))]


def run(*command: str) -> subprocess.CompletedProcess:
    return subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize(
    "command", [("ruff", "check", "--no-cache", "."), ("lint-imports", "--no-cache")], ids=lambda command: command[0]
)
def test_linters(command):
    """The floors and the style, which .ci/run checks first so that they fail early."""
    done = run(str(pathlib.Path(sys.executable).parent / command[0]), *command[1:])
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_first_floor_is_whole():
    """The contract that keeps models and text out names every room of the first floor that exists."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    contracts = {contract["id"]: contract for contract in config["contracts"]}
    first_floor = re.findall(r"\w+", contracts["floors"]["layers"][-1])
    assert set(contracts["arrays"]["source_modules"]) == {f"stackalign.{room}" for room in first_floor if room in ROOMS}


def test_every_module_imports():
    """In one fresh interpreter, except the binaries: two of them may define a flag of the same name."""
    code = """
import importlib, sys, traceback
failed = False
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except Exception:
        failed = True
        print(name, traceback.format_exc())
sys.exit(failed)
"""
    done = run(sys.executable, "-c", code, *(name for name in SOURCES if name not in BINARIES))
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_version_is_read_without_dependencies():
    """Importing the package alone imports neither JAX nor a room."""
    code = "import sys, stackalign; print([name for name in sys.modules if name.startswith(('jax', 'stackalign.'))])"
    assert run(sys.executable, "-c", code).stdout.strip() == "[]"


@pytest.mark.parametrize("room", ROOMS)
def test_public_names(room):
    """Ruff keeps them sorted (RUF022)."""
    module = importlib.import_module(f"stackalign.{room}")
    assert module.__all__
    assert [name for name in module.__all__ if not hasattr(module, name)] == []
    assert len(set(module.__all__)) == len(module.__all__)


@pytest.mark.parametrize("name", BINARIES)
def test_help(name):
    """Prints what the module says of itself; absl leaves with 1 after it."""
    done = run(sys.executable, "-m", name, "--help")
    assert done.returncode in (0, 1), done.stderr
    docstring = ast.get_docstring(ast.parse(SOURCES[name].read_text()))
    assert docstring.splitlines()[0] in " ".join(done.stdout.split())


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a checkout")
def test_no_machine_paths():
    done = run("git", "ls-files", "-z")
    assert done.returncode == 0, done.stderr
    pattern = re.compile(rb"/(?:work|farm|root|home|Users)/|/tmp/[a-z]|" + re.escape(str(ROOT)).encode())
    files = [ROOT / name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]
    assert [str(path.relative_to(ROOT)) for path in files if pattern.search(path.read_bytes())] == []


def test_readme_examples_run():
    """Every Python block of README.md, as it stands."""
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 2
    for block in blocks:
        done = run(sys.executable, "-c", block)
        assert done.returncode == 0, f"{block}\n{done.stderr}"


def test_ci_runs_the_readme_command():
    fences = re.findall(r"^ *```.*?\n(.*?)^ *```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    commands = [line.strip() for fence in fences for line in fence.splitlines() if "pytest" in line]
    assert commands[0] == "pip install -e '.[test]' && python -m pytest"
    assert run("bash", str(ROOT / ".ci" / "run"), "--print").stdout.strip() == commands[0]
