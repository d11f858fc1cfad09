"""Jinja for chat templates: an immutable sandbox with limits on time and size.

A template comes with a model folder, so it is somebody else's program. Jinja's sandbox keeps it from Python's
objects and from changing what it is given; what is added here keeps it from running for ever and from filling
the memory: every call and every turn of a loop looks at the clock, and what makes text longer (``+``, ``*``,
``~``, ``%``, filters, methods of strings) is refused beyond a size.
"""

import datetime
import functools
import json
import re
import time
from collections.abc import Callable, Iterable
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_TEMPLATE_CHARACTERS = 1 << 18
MAX_CHARACTERS = 1 << 22
"""Of a rendered conversation, and of any value on the way to it."""
RENDER_SECONDS = 10.0
"""Of computing: on a machine that is busy with other things a sound conversation must not become a bad row."""
_MAX_NUMBER = 1 << 20  # as an argument: of center(), ljust(), indent() and the like
_MAX_EXPONENT = 64
_WIDE_FORMAT = re.compile(r"\d{6,}|\*")

SPAN_START, SPAN_END = "\ufdd0", "\ufdd1"
"""Noncharacters of Unicode, set around what ``{% generation %}`` holds."""


class TemplateError(Exception):
    """A template that cannot be read or rendered; the text says why."""


class Environment(ImmutableSandboxedEnvironment):
    """Jinja as ``transformers`` sets it up, with limits.

    Args:
        today: what ``strftime_now`` tells; fixed, so that a resumed run sees the same tokens.
    """

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, today: datetime.date) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", Generation],
            finalize=self.within_size,
        )
        self.mark_spans = False
        self._deadline = float("inf")
        self.filters["tojson"] = _to_json
        self.filters = {name: self._limited(name, f) for name, f in self.filters.items()}
        self.globals["raise_exception"] = _refuse
        self.globals["strftime_now"] = lambda form: today.strftime(form)

    def render(self, template: jinja2.Template, variables: dict[str, Any]) -> str:
        """The rendered text.

        Raises:
            TemplateError: if the template refuses the conversation, has an error, or meets a limit.
        """
        self._deadline = time.thread_time() + RENDER_SECONDS
        chunks, size = [], 0
        try:
            for chunk in template.generate(**variables):
                self.tick()
                size += len(chunk)
                if size > MAX_CHARACTERS:
                    raise TemplateError(f"it renders more than {MAX_CHARACTERS} characters")
                chunks.append(chunk)
        except TemplateError:
            raise
        except Exception as error:  # a template can raise whatever Python's operators can
            raise TemplateError(f"{type(error).__name__}: {error}") from error
        return "".join(chunks)

    def compile_template(self, text: str) -> jinja2.Template:
        """Compile ``text``.

        Raises:
            TemplateError: if it is no template, or too long.
        """
        if len(text) > MAX_TEMPLATE_CHARACTERS:
            raise TemplateError(
                f"it has {len(text)} characters, more than {MAX_TEMPLATE_CHARACTERS}"
            )
        try:
            return self.from_string(text)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(f"line {error.lineno}: {error.message}") from error
        except RecursionError as error:
            raise TemplateError("it is nested too deeply") from error

    def tick(self) -> str:
        """Look at the clock; called from everything that can repeat."""
        if time.thread_time() > self._deadline:
            raise TemplateError(f"it runs for more than {RENDER_SECONDS:g} s")
        return ""

    def within_size(self, value: Any) -> Any:
        """``value``, if writing it out stays within the limits."""
        if isinstance(value, str | list | tuple | dict) and _size(value) > MAX_CHARACTERS:
            raise TemplateError(f"it makes a value of more than {MAX_CHARACTERS} characters")
        return value

    def concatenate(self, *parts: Any) -> str:
        """The operator ``~``."""
        return self.within_size("".join(str(self.within_size(part)) for part in parts))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """``+``, ``*``, ``**`` and ``%``, refused where the result would be too large."""
        self.tick()
        if operator == "%" and isinstance(left, str) and _WIDE_FORMAT.search(left):
            raise TemplateError("it formats a number to a great width")
        if operator == "**" and not (_within(left, _MAX_NUMBER) and _within(right, _MAX_EXPONENT)):
            raise TemplateError("it takes a power that is too large")
        if operator == "*" and _product(left, right) > MAX_CHARACTERS:
            raise TemplateError(f"it makes a value of more than {MAX_CHARACTERS} characters")
        return self.within_size(super().call_binop(context, operator, left, right))

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - as in jinja2: the names are free for templates
        """Every call from a template."""
        __self.tick()
        owner = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
        if isinstance(owner, str):
            __self._check_growth(__obj.__name__, (owner, *args, *kwargs.values()))
        return __self.within_size(super().call(__context, __obj, *args, **kwargs))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _Watched().visit(super()._parse(source, name, filename))

    def _limited(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def limited(*args: Any, **kwargs: Any) -> Any:
            self.tick()
            self._check_growth(name, (*args, *kwargs.values()))
            return self.within_size(function(*args, **kwargs))

        return limited

    def _check_growth(self, name: str, args: tuple[Any, ...]) -> None:
        """Refuse a filter or method of strings whose result could be far larger than its arguments."""
        for value in args:
            self.within_size(value)
            if isinstance(value, int) and abs(value) > _MAX_NUMBER:
                raise TemplateError(f"it calls {name} with a number above {_MAX_NUMBER}")
        texts = [value for value in args if isinstance(value, str)]
        lists = [value for value in args if isinstance(value, list | tuple)]
        grown = 0
        if name == "replace" and len(texts) == 3:
            grown = texts[0].count(texts[1]) * len(texts[2])
        elif name == "join" and texts:
            grown = len(texts[0]) * max(map(len, lists or texts[1:]), default=0)
        elif name == "indent" and texts:
            widths = [value for value in args if isinstance(value, int)]
            grown = texts[0].count("\n") * max([*widths, *map(len, texts[1:])], default=4)
        if grown > MAX_CHARACTERS:
            raise TemplateError(f"it calls {name} on values that are too large")
        if name in ("format", "format_map") and any(map(_WIDE_FORMAT.search, texts)):
            raise TemplateError("it formats a number to a great width")


class Generation(Extension):
    """``{% generation %} ... {% endgeneration %}``: what the assistant says, as in ``transformers``."""

    tags = {"generation"}  # noqa: RUF012 - so in jinja2

    def parse(self, parser: Parser) -> nodes.Node:
        """Parse one block."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Callable[[], str]) -> str:
        text = caller()
        return SPAN_START + text + SPAN_END if self.environment.mark_spans else text  # pyright: ignore[reportAttributeAccessIssue] - ours


class _Watched(NodeTransformer):
    """Puts a look at the clock into every loop, and ``~`` under the limit on size."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 - so in jinja2
        self.generic_visit(node)
        tick = nodes.Call(nodes.EnvironmentAttribute("tick"), [], [], None, None)
        node.body.insert(0, nodes.ExprStmt(tick).set_lineno(node.lineno))
        node.body[0].set_environment(node.environment)  # pyright: ignore[reportArgumentType] - the parser has set it
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802 - so in jinja2
        self.generic_visit(node)
        call = nodes.Call(nodes.EnvironmentAttribute("concatenate"), node.nodes, [], None, None)
        return call.set_lineno(node.lineno).set_environment(node.environment)  # pyright: ignore[reportArgumentType] - likewise


def _size(value: Any) -> int:
    """Characters of a value written out, at least; stops counting beyond the limit."""
    if isinstance(value, str):
        return len(value)
    waiting: list[Any] = [value]
    total = 0
    while waiting and total <= MAX_CHARACTERS:
        item = waiting.pop()
        if isinstance(item, dict):
            waiting += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple):
            waiting += item
        total += len(item) + 1 if isinstance(item, str) else 1
    return total


def _within(value: Any, limit: int) -> bool:
    """Whether it is a number of no more than ``limit``, with either sign."""
    return isinstance(value, int | float) and abs(value) <= limit


def _product(left: Any, right: Any) -> int:
    """Characters of ``left * right``: of a repeated text or list, or the digits of a number."""
    if isinstance(left, int) and isinstance(right, int):
        return (left.bit_length() + right.bit_length()) << 12
    times = max((n for n in (left, right) if isinstance(n, int)), default=0)
    return times * max((_size(v) for v in (left, right) if not isinstance(v, int)), default=0)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as ``transformers`` writes it: characters as they are, nothing escaped for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(message: str) -> None:
    raise TemplateError(f"the template refuses it: {message}")


def texts_of(value: Any) -> Iterable[str]:
    """All strings inside ``value``, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from texts_of(key)
            yield from texts_of(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from texts_of(item)
