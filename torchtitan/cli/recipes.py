"""``torchtitan recipes``: what there is to train, one recipe's config, and what sets two apart."""

import json
from collections.abc import Sequence

from torchtitan.cli.output import say
from torchtitan.config import Configurable, differences, format_tree, to_dict
from torchtitan.config.recipes import find_module, find_recipe, modules_under, recipes_in
from torchtitan.errors import ConfigError

USAGE = """\
usage: torchtitan recipes list [MODULE]       recipes of a module or package (default torchtitan_recipes)
       torchtitan recipes show M.C [--json]   the config tree of recipe C of module M
       torchtitan recipes diff M.A M.B        the fields in which two recipes differ

M is an importable module, or the path of a .py file followed by a colon: my/recipes.py:C
"""


def main(argv: Sequence[str]) -> int:
    """Run ``torchtitan recipes ...`` and return its exit code."""
    match list(argv):
        case [] | ["-h"] | ["--help"]:
            say(USAGE)
        case ["list"]:
            say(_listing("torchtitan_recipes"))
        case ["list", module] | ["list", "--module", module] if module != "--module":
            say(_listing(find_module(module)))
        case ["show", recipe]:
            say(format_tree(_build(recipe)))
        case ["show", recipe, "--json"]:
            say(json.dumps(to_dict(_build(recipe)), indent=2))
        case ["diff", old, new]:
            found = differences(_build(old), _build(new))
            say("\n".join(map(str, found)) or "no differences")
        case wrong:
            raise ConfigError(f"recipes {' '.join(wrong)}: is not understood\n{USAGE}")
    return 0


def _listing(package: str) -> str:
    """Every recipe with the first line of its docstring, by module; nothing is imported for it."""
    blocks: list[str] = []
    for module in modules_under(package):
        recipes = recipes_in(module)
        if recipes:
            width = max(map(len, recipes))
            rows = (f"  {name:<{width}}  {summary}".rstrip() for name, summary in recipes.items())
            blocks.append("\n".join((module, *rows)))
    return "\n\n".join(blocks) or f"no recipes in {package}"


def _build(recipe: str) -> Configurable.Config:
    module, separator, name = recipe.rpartition(":" if ":" in recipe else ".")
    if not separator:
        raise ConfigError(f"{recipe}: names no module; write it as module.recipe or file.py:recipe")
    return find_recipe(module, name).build()
