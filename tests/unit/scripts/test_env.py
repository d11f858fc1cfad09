"""Setting up .venv, with a Python that only notes what it is asked to do."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

PYTHON = """#!/usr/bin/env bash
echo "$(basename "$0") $*" >>"$LOG"
case "$*" in
    "-P "*) [[ -n "${HAS_PACKAGE:-}" || -f "$(dirname "$0")/../installed" ]] ;;
    "-c "*) [[ -z "${TOO_OLD:-}" ]] ;;
    "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    *" -e "*) [[ -z "${INTERRUPTED:-}" ]] && touch "$(dirname "$0")/../installed" ;;
    "-m torchtitan.train"*) pwd ;;
esac
"""


@pytest.fixture
def checkout(tmp_path):
    """A copy of what set-up needs, and a folder ``bin`` with nothing but a few tools and a false Python."""
    root, tools = tmp_path / "check out", tmp_path / "bin"
    for name in ("run_train.sh", "scripts/env.sh", "scripts/has_package.py", "pyproject.toml"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, root / name)
    (root / "constraints.txt").write_text("torch==2.13.0\n", encoding="utf-8")
    tools.mkdir()
    for name in (
        "bash",
        "env",
        "basename",
        "dirname",
        "cat",
        "cksum",
        "mkdir",
        "cp",
        "rm",
        "touch",
    ):
        found = shutil.which(name)
        assert found
        (tools / name).symlink_to(found)
    (tools / "python3.12").write_text(PYTHON, encoding="utf-8")
    (tools / "python3.12").chmod(0o755)
    return root


def run(checkout: Path, *arguments: str, **variables: str) -> tuple[int, str, list[str]]:
    """Run ``run_train.sh`` from another folder; return its code, output and what Python was asked to do."""
    log = checkout.parent / "log"
    log.write_text("", encoding="utf-8")
    done = subprocess.run(
        ["bash", str(checkout / "run_train.sh"), *arguments],
        cwd=checkout.parent,
        env={"PATH": str(checkout.parent / "bin"), "LOG": str(log), **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    text = log.read_text(encoding="utf-8").replace(str(checkout), "ROOT")
    asked = [line for line in text.splitlines() if " -c import" not in line and " -P " not in line]
    return done.returncode, done.stdout + done.stderr, asked


PIP = "python -m pip install --disable-pip-version-check -c ROOT/constraints.txt"
SET_UP = ["python3.12 -m venv ROOT/.venv", f"{PIP} torch", f"{PIP} --quiet -e ROOT"]
TRAIN = "python -m torchtitan.train"


def test_first_use_makes_the_environment_torch_first_and_later_uses_start_at_once(checkout):
    code, out, asked = run(checkout)
    assert (code, asked) == (0, [*SET_UP, TRAIN])
    assert "once; a few minutes" in out
    assert out.startswith(f"{checkout.parent}\n")  # it trains where the user stands
    assert run(checkout) == (0, f"{checkout.parent}\n", [TRAIN])


def test_an_interrupted_set_up_is_made_again(checkout):
    code, out, _ = run(checkout, INTERRUPTED="1")
    assert code == 2
    assert "error: the packages could not be installed; see above, and run again to retry" in out
    assert run(checkout)[2] == [*SET_UP, TRAIN]


def test_changed_requirements_are_installed_again(checkout):
    run(checkout)
    (checkout / "constraints.txt").write_text("torch==2.14.0\n", encoding="utf-8")
    assert run(checkout)[2] == [*SET_UP[1:], TRAIN]


def test_extras_are_asked_for(checkout):
    assert f"{PIP} --quiet -e ROOT[data,wandb]" in run(checkout, EXTRAS="data,wandb")[2]


def test_an_active_environment_that_has_the_package_is_used(checkout):
    tools = checkout.parent / "bin"
    shutil.copy(tools / "python3.12", tools / "python")
    assert run(checkout, HAS_PACKAGE="1")[2] == [TRAIN]
    assert not (checkout / ".venv").exists()


def test_variables_become_options_and_arguments_pass_through(checkout):
    variables = {"MODULE": "m.n", "CONFIG": "c", "NGPU": "4", "NNODES": "2", "LOG_RANK": "0,1"}
    asked = run(checkout, "--a.b", "x y", "--dry-run", **variables)[2]
    options = "--module m.n --config c --ngpu 4 --nnodes 2 --log-rank 0,1"
    assert asked[-1] == f"{TRAIN} {options} --a.b x y --dry-run"


def test_no_python_that_is_new_enough_is_told(checkout):
    code, out, asked = run(checkout, TOO_OLD="1")
    assert (code, asked) == (2, [])
    assert "error: no Python 3.11 or newer with the modules venv and ensurepip on PATH" in out


@pytest.mark.parametrize("script", ["run_train.sh", "scripts/env.sh", "tests/run.sh"])
def test_scripts_parse(script):
    subprocess.run(["bash", "-n", str(ROOT / script)], check=True)


def has_package(extras: str, *, path: str, cwd: Path) -> int:
    command = [sys.executable, "-P", str(ROOT / "scripts" / "has_package.py"), extras]
    environ = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    return subprocess.run(
        command, env={**environ, "PYTHONPATH": path}, cwd=cwd, check=False
    ).returncode


def test_the_package_is_there_only_if_it_can_be_imported_from_anywhere(tmp_path):
    assert has_package("", path=str(ROOT), cwd=tmp_path) == 0
    assert has_package("dev", path=str(ROOT), cwd=tmp_path) == 0
    (tmp_path / "torchtitan").mkdir()
    (tmp_path / "torchtitan" / "__init__.py").touch()
    assert has_package("", path=str(tmp_path), cwd=tmp_path) == 1  # another package of that name
