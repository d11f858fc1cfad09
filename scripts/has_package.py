"""Exit 0 if this interpreter has torchtitan and every package that pyproject.toml asks for, else 1.

usage: python -P scripts/has_package.py [EXTRA,EXTRA...]

Run with ``-P``, so that a folder named torchtitan in the current directory does not count.
"""

import re
import sys
import tomllib
from importlib import metadata, util
from pathlib import Path


def required(extras: list[str]) -> set[str]:
    """Names of the distributions that torchtitan needs, with these extras of it."""
    text = (Path(__file__).parent.parent / "pyproject.toml").read_text(encoding="utf-8")
    project = tomllib.loads(text)["project"]
    lines = list(project["dependencies"])
    for extra in extras:
        lines += project["optional-dependencies"][extra]
    names: set[str] = set()
    for line in lines:
        name = re.split(r"[^\w.-]", line)[0]
        inner = re.findall(r"\[(.*?)\]", line)
        names |= required(inner[0].split(",")) if name == project["name"] else {name}
    return names


def is_installed(name: str) -> bool:
    """Whether a distribution of that name is there."""
    try:
        return bool(metadata.version(name))
    except metadata.PackageNotFoundError:
        return False


def main() -> int:
    """Check, and return the exit code."""
    extras = [extra for extra in "".join(sys.argv[1:]).split(",") if extra]
    found = util.find_spec("torchtitan")
    folders = (found and found.submodule_search_locations) or []
    if not any((Path(folder) / "cli" / "main.py").exists() for folder in folders):
        return 1  # none, or another package of that name
    return 0 if all(map(is_installed, required(extras))) else 1


if __name__ == "__main__":
    sys.exit(main())
