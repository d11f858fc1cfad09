"""Every ``Config`` of the package keeps to the style: annotated fields, each with a docstring under it."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import torchtitan

FILES = sorted(Path(torchtitan.__file__).parent.rglob("*.py"))


def offences(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef) and is_config(node):
            if not any("kw_only=True, slots=True" in ast.unparse(d) for d in node.decorator_list):
                yield f"{node.lineno}: not @dataclass(kw_only=True, slots=True)"
            yield from field_offences(node)


def is_config(node: ast.ClassDef) -> bool:
    return any(ast.unparse(base).endswith(".Config") for base in node.bases)


def field_offences(node: ast.ClassDef) -> Iterator[str]:
    for statement, after in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) != "OPERATIONAL":
            yield f"{statement.lineno}: {ast.unparse(statement)} is neither field nor ClassVar"
        if isinstance(statement, ast.AnnAssign):
            name = ast.unparse(statement.target)
            if name == "type":
                yield f"{statement.lineno}: a field named type would hide a node's type in JSON"
            documented = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            if not documented and "ClassVar" not in ast.unparse(statement.annotation):
                yield f"{statement.lineno}: {name} has no docstring under it"


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(FILES[0].parent)))
def test_configs_have_annotated_and_documented_fields(file):
    assert list(offences(file.read_text(encoding="utf-8"))) == []


def test_each_offence_is_found():
    source = '''
class Bad(Layer.Config):
    x = 3
    y: int = 3
    type: str
    """Documented."""
    z: ClassVar[int] = 3
'''
    assert [line.partition(": ")[2] for line in offences(source)] == [
        "not @dataclass(kw_only=True, slots=True)",
        "x = 3 is neither field nor ClassVar",
        "y has no docstring under it",
        "a field named type would hide a node's type in JSON",
    ]
