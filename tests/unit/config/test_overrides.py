import math
import re
from pathlib import Path

import pytest

from tests.unit.config.toy import Color, Root, tree
from torchtitan.config import Configurable, differences, leaves
from torchtitan.config.help import help_text
from torchtitan.config.overrides import apply_flags, split_flags
from torchtitan_recipes.models.llama3 import llama3_debugmodel


def override(line: str) -> tuple[Root.Config, list[str]]:
    flags, misuse = split_flags(line.split())
    config, problems = apply_flags(tree(), flags)
    return config, [str(problem) for problem in [*misuse, *problems]]


def changed(line: str) -> dict[str, object]:
    config, problems = override(line)
    assert problems == []
    return {d.path: d.new for d in differences(tree(), config)}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--steps 5", {"steps": 5}),
        ("--steps=-5", {"steps": -5}),
        ("--lr -1e-4", {"lr": -1e-4}),
        ("--lr inf", {"lr": math.inf}),
        ("--lr 1 --lr 2", {"lr": 2.0}),
        ("--layer.stretch 2", {"layer.stretch": 2.0}),  # a field of the recipe's subclass
        ("--held-out.path x", {"held_out.path": "x"}),
        ("--held_out.path=--x=y", {"held_out.path": "--x=y"}),
        ("--held-out None", {"held_out": None}),
        ("--sources.1.weight 3", {"sources.1.weight": 3.0}),
        ("--named.books.path p", {"named.books.path": "p"}),
        ("--betas 0.5 0.6", {"betas": (0.5, 0.6)}),
        ("--lengths 7 8 9", {"lengths": (7, 8, 9)}),
        ("--lengths", {"lengths": ()}),
        ("--tags a b", {"tags": ["a", "b"]}),
        ("--keywords a 1 b x", {"keywords": {"a": 1, "b": "x"}}),
        ("--keywords.new 0.5", {"keywords": {"group": "x", "new": 0.5}}),
        ("--by-layer 3 0.5", {"by_layer": {3: 0.5}}),
        ("--mode exact", {"mode": "exact"}),
        ("--mode EXACT", {"mode": "exact"}),
        ("--color blue", {"color": Color.BLUE}),
        ("--limit 3", {"limit": 3}),
        ("--cache /tmp/x", {"cache": Path("/tmp/x")}),
        ("--compiled", {"compiled": True}),
        ("--compiled true", {"compiled": True}),
        ("--compiled=True", {"compiled": True}),
        ("--compiled false", {}),
        ("--other-layer None", {}),
    ],
)
def test_an_override_sets_its_field_and_no_other(line, expected):
    assert changed(line) == expected


def test_the_recipe_itself_is_not_touched():
    base = tree()
    apply_flags(base, split_flags(["--sources.0.path", "new", "--keywords.k", "1"])[0])
    assert base == tree()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("stray", "stray: belongs to no flag; write overrides as --section.field value"),
        ("--step 5", "step=5: no such field in this recipe; did you mean --steps?"),
        (
            "--weight 2",
            "weight=2: no such field in this recipe; "
            "did you mean --held_out.weight or --sources.0.weight or --sources.1.weight?",
        ),
        ("--layer.lr 1", "layer.lr=1: no such field in this recipe; did you mean --lr?"),
        ("--xyzzy 1", "xyzzy=1: no such field in this recipe; --help lists the fields"),
        (
            "--other-layer.width 1",
            "other-layer.width=1: the section other_layer is off (None); turn it on in a recipe",
        ),
        ("--lr.x 1", "lr.x=1: lr is a value, not a section; set --lr itself"),
        ("--layer 3", "layer=3: is a section (WideLayer), not a value; set its fields"),
        (
            "--held-out x",
            "held-out=x: is a section (Source), not a value; set its fields, or None to turn it off",
        ),
        (
            "--steps x",
            "steps=x: does not fit the field's type, int; give INT, such as the recipe's 4",
        ),
        ("--steps", "steps=: got no value, but takes INT; give INT, such as the recipe's 4"),
        (
            "--betas 1",
            "betas=1: got one value, but takes FLOAT FLOAT; give FLOAT FLOAT, such as the recipe's (0.9, 0.95)",
        ),
        (
            "--lr 1 2",
            "lr=1 2: got 2 values, but takes FLOAT; give FLOAT, such as the recipe's 0.001",
        ),
        ("--mode exakt", "mode=exakt: is not one of fast, exact; did you mean exact?"),
        ("--color g", "color=g: is not one of RED, BLUE; the choices are: BLUE, RED"),
        (
            "--compiled maybe",
            "compiled=maybe: is not one of True, False; the choices are: False, True",
        ),
        (
            "--limit z",
            "limit=z: does not fit the field's type, int | None; give {None}|INT, such as the recipe's None",
        ),
        (
            "--by-layer.x y",
            "by-layer.x=y: does not fit the field's type, float; give FLOAT, such as the recipe's None",
        ),
    ],
)
def test_a_wrong_override_is_refused_in_words(line, expected):
    config, problems = override(line)
    assert problems == [expected]
    assert config == tree()


def test_all_problems_are_reported_and_the_good_ones_applied():
    config, problems = override("oops --step 5 --steps 6 --lr fast --mode exakt")
    assert [problem.partition("=")[0].partition(":")[0] for problem in problems] == [
        "oops",
        "step",
        "lr",
        "mode",
    ]
    assert config.steps == 6


def test_a_type_without_a_form_on_the_command_line_is_refused():
    config = tree()
    config.sources = []
    _, problems = apply_flags(config, split_flags(["--sources", "a"])[0])
    assert str(problems[0]) == (
        "sources=a: does not fit the field's type, list[Source.Config], which has no form on the command line; "
        "set it in a recipe"
    )


def help_flags(config: Configurable.Config) -> set[str]:
    text = help_text(config, program="p", description="d")
    return set(re.findall(r"--([a-z][\w.-]*)", text)) - {"help"}


def test_help_and_overrides_know_the_same_fields():
    config = tree()
    config.keywords = {}
    shown = {flag.replace("-", "_") for flag in help_flags(config)}
    off = {"other_layer"}  # a section that the recipe turns off has no fields to show
    assert shown == {leaf.path for leaf in leaves(config)} - off


def test_help_of_the_default_recipe_shows_every_field_that_the_command_line_can_set():
    config = llama3_debugmodel()
    shown = {flag.replace("-", "_") for flag in help_flags(config)}
    known = {leaf.path for leaf in leaves(config)}
    assert shown <= known
    for path in known - shown:  # sections that are off, and lists of sections that are empty
        _, (problem,) = apply_flags(config, split_flags([f"--{path}", "x"])[0])
        assert problem.reason.endswith("has no form on the command line")


def test_a_dict_with_entries_is_shown_by_its_keys_which_can_be_overridden():
    assert "keywords.group" in help_flags(tree())
    assert changed("--keywords.group y") == {"keywords": {"group": "y"}}


def test_help_shows_docstrings_and_the_recipes_values():
    text = " ".join(help_text(tree(), program="p", description="Recipe toy.").split())
    assert "Recipe toy." in text
    assert "Optimizer steps. (default: 4)" in text
    assert "Factor. (default: 1.5)" in text
    assert "{fast,exact} How. (default: fast)" in text
