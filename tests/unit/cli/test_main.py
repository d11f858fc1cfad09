import subprocess
import sys
from pathlib import Path

import pytest

from torchtitan.cli.main import COMMANDS, main
from torchtitan.cli.options import DEFAULT_CONFIG, DEFAULT_MODULE
from torchtitan.environment import VARIABLES
from torchtitan.errors import EXIT_CODES


def test_help_lists_commands_exit_codes_and_variables(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {name} " in text for name in COMMANDS)
    assert all(f"  {code}  {meaning}" in text for code, meaning in EXIT_CODES.items())
    assert "MASTER_ADDR, MASTER_PORT" in text
    assert main([]) == 0
    assert capsys.readouterr().out == text


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == "torchtitan 0.1.0\n"


def test_an_unknown_command_is_answered(capsys):
    assert main(["trian"]) == 2
    assert capsys.readouterr().err == "error: trian: no such command; did you mean train?\n"


def test_recipes_list_and_misuse(capsys):
    assert main(["recipes", "list", "tests.unit.cli.toy_run"]) == 0
    expected = (
        "tests.unit.cli.toy_run\n  toy_run  A run.\n  no_root  A config that is not a root.\n"
    )
    assert capsys.readouterr().out == expected
    assert main(["recipes", "list", "--module", "tests.unit.cli.toy_run"]) == 0
    assert capsys.readouterr().out == expected
    assert main(["recipes", "list"]) == 0
    assert "llama3_debugmodel" in capsys.readouterr().out
    assert main(["recipes"]) == 0
    assert "usage: torchtitan recipes" in capsys.readouterr().out
    assert main(["recipes", "shwo", "x"]) == 2
    assert "error: recipes shwo x: is not understood\nusage:" in capsys.readouterr().err
    assert main(["recipes", "show", "x"]) == 2
    assert "error: x: names no module; write it as module.recipe" in capsys.readouterr().err


def test_a_module_without_recipes_says_so(capsys):
    assert main(["recipes", "list", "tests.unit.config.test_fields"]) == 0
    assert main(["recipes", "list", "torchtitan.errors"]) == 0
    assert capsys.readouterr().out.endswith("no recipes in torchtitan.errors\n")


def test_recipes_show_and_diff(capsys):
    assert main(["recipes", "show", "tests.unit.cli.toy_run.toy_run"]) == 0
    assert "  act        'work'" in capsys.readouterr().out
    assert main(["recipes", "show", "tests.unit.cli.toy_run:toy_run", "--json"]) == 0
    assert '"type": "tests.unit.cli.toy_run:Run.Config"' in capsys.readouterr().out
    both = ["tests.unit.cli.toy_run.toy_run"] * 2
    assert main(["recipes", "diff", *both]) == 0
    assert capsys.readouterr().out == "no differences\n"
    assert main(["recipes", "diff", both[0], "tests.unit.cli.toy_run.no_root"]) == 0
    assert capsys.readouterr().out == ": Run -> Configurable\n"


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--help"], 0),
        (["nothing"], 2),
        (["recipes", "list"], 0),
        (["train", "--module", "torchtitan_recipes.models.lama3"], 2),
        (["train", "--config", "llama3_debugmodl"], 2),
        (["train", "--ngpu", "0", "stray"], 2),
    ],
)
def test_what_needs_no_recipe_is_answered_without_torch(arguments, code):
    program = (
        "import sys\nfrom torchtitan.cli.main import main\n"
        "code = main(sys.argv[1:])\nassert 'torch' not in sys.modules\nsys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stderr


def test_the_page_on_the_command_line_has_the_same_tables():
    page = (Path(__file__).parents[3] / "docs" / "cli.md").read_text(encoding="utf-8")
    for code, meaning in EXIT_CODES.items():
        assert f"\n| {code} | {meaning} |\n" in page
    for name, meaning in VARIABLES.items():
        assert f"\n| `{name}` | {meaning} |\n" in page
    for default in (DEFAULT_MODULE, DEFAULT_CONFIG):
        assert f"| `{default}` |" in page


def test_the_package_is_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "torchtitan", "nothing"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "nothing" in done.stderr
