"""The names that a module's source gives at its top level, read without importing it."""

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SourceFunction:
    """A function at the top level of a module: its required parameters and its docstring's first line."""

    required: list[str]
    summary: str


@dataclass(frozen=True, slots=True)
class SourceNames:
    """Top-level names: functions defined in the module, and others (imported or assigned)."""

    functions: dict[str, SourceFunction]
    others: set[str]

    def recipes(self) -> dict[str, str]:
        """Name -> summary of the public functions without required parameters."""
        return {
            name: function.summary
            for name, function in self.functions.items()
            if not name.startswith("_") and not function.required
        }


def read_names(module: ast.Module) -> SourceNames | None:
    """The top-level names of ``module``; None if they depend on running it (``import *``, ``__getattr__``)."""
    functions: dict[str, SourceFunction] = {}
    others: set[str] = set()
    for statement in _statements(module.body):
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            summary = (ast.get_docstring(statement) or "").partition("\n")[0]
            functions[statement.name] = SourceFunction(_required(statement.args), summary)
        elif isinstance(statement, ast.Import | ast.ImportFrom):
            others |= {(a.asname or a.name).partition(".")[0] for a in statement.names}
        else:
            others |= {
                node.id
                for node in ast.walk(statement)
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
            }
    if "*" in others or "__getattr__" in functions:
        return None
    return SourceNames(functions, others)


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of the module's scope, also those inside ``if``, ``try`` and ``with``."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.If | ast.Try | ast.With):
            for block in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(statement, block, []))
            if isinstance(statement, ast.Try):
                for handler in statement.handlers:
                    yield from _statements(handler.body)


def _required(arguments: ast.arguments) -> list[str]:
    positional = arguments.posonlyargs + arguments.args
    without_default = positional[: len(positional) - len(arguments.defaults)]
    keywords = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    return [a.arg for a in without_default] + [a.arg for a, default in keywords if default is None]
