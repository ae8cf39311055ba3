"""A Jinja environment that runs hostile chat templates as Hugging Face renders them, in bounded time and memory.

Three layers: Jinja's immutable sandbox, an allow list of attributes and callables instead of its deny list, and a
budget that the rewritten syntax tree (`harden.py`) asks before everything whose cost the template chooses.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from datetime import datetime
from types import BuiltinMethodType, CodeType, MethodType
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.runtime import BlockReference, Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range
from jinja2.utils import Namespace, pass_context

from edgellama.chat import guards
from edgellama.chat.harden import check_size, harden
from edgellama.chat.limits import ADVICE, SCALARS, Budget, Lazy, Limits, exceeded
from edgellama.errors import EdgellamaError, TemplateError

FAULTS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    MemoryError,
    NameError,
    OSError,
    RuntimeError,
    StopIteration,
    SyntaxError,
    TypeError,
    ValueError,
    jinja2.TemplateError,
)
"""Everything code made from a template can raise."""

_LOOP_PLACES = frozenset({"index", "index0", "revindex", "revindex0", "first", "last", "length", "depth", "depth0"})
_LOOP = _LOOP_PLACES | {"cycle", "changed", "previtem", "nextitem"}
_DICT = frozenset({"get", "items", "keys", "values", "copy", "fromkeys"})
_SEQUENCE = frozenset({"count", "index", "copy"})
_MACRO = frozenset({"name", "arguments", "catch_kwargs", "catch_varargs", "caller"})
_NUMBER = frozenset({"is_integer", "real", "imag", "bit_length"})


class RefusedError(TemplateError):
    """The template itself refused the conversation, by `raise_exception`."""


def printable(text: object, limit: int = 300) -> str:
    """Text from a template, safe to show in a terminal."""
    line = "".join(c if c.isprintable() else " " for c in str(text)[: 2 * limit])
    return " ".join(line.split())[:limit]


class TemplateNamespace(Namespace):
    """Jinja's `namespace`, without names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        attributes = dict(*args[1:], **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise TemplateError(f"the chat template stores an underscore name, {printable(name)!r}", ADVICE)


class TemplateDict:
    """The global `dict`: makes dictionaries, and is no type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


class GenerationExtension(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks an answer for training; here the text passes through."""

    tags = {"generation"}  # noqa: RUF012  (Jinja's own declaration)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("pass_through"), [], [], body).set_lineno(line)

    def pass_through(self, caller: Macro) -> Any:
        """The block's text."""
        return caller()


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """One rendering: filters, operators, calls and attributes draw on `budget`."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "**", "%"})

    def __init__(self, budget: Budget, now: Callable[[], datetime] = datetime.now) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # constants are computed in the rendering, under the budget, not by the compiler
            extensions=[GenerationExtension, jinja2.ext.loopcontrols],
            cache_size=0,
        )
        self.budget = budget
        self.finalize = self._finalize
        self.filters["tojson"] = lambda value, *args, **kwargs: guards.tojson(budget, value, *args, **kwargs)
        self.filters.update({name: guards.guarded_filter(budget, name, f) for name, f in self.filters.items()})
        self.filters.update(self._internal_filters())
        self.tests.update({name: guards.guarded_test(budget, f) for name, f in self.tests.items()})

        def strftime_now(format: str) -> str:
            if len(format) > guards.MAX_WIDTH:
                raise exceeded("formats the date with a huge pattern", f"{guards.MAX_WIDTH} characters")
            return now().strftime(format)

        self.globals = {
            "range": self._range,
            "dict": TemplateDict(),
            "namespace": TemplateNamespace,
            "raise_exception": _raise_exception,
            "strftime_now": strftime_now,
        }
        self._callables = frozenset(id(value) for value in self.globals.values())

    def _range(self, *args: int) -> range:
        return safe_range(*args)

    def _internal_filters(self) -> dict[str, Callable[..., Any]]:
        """Filters the hardened tree uses; their names cannot be written in a template."""
        budget = self.budget

        @pass_context
        def plain(_context: Context, value: Any) -> Any:
            budget.step()
            if type(value) not in SCALARS:
                budget.weigh(value)
            return value

        @pass_context
        def text(_context: Context, value: Any) -> Any:
            size = budget.text_length(value)
            budget.fits(size)
            budget.charge(size)
            return value

        @pass_context
        def data(_context: Context, size: int) -> str:
            budget.charge(size)
            return ""

        @pass_context
        def each(_context: Context, values: Any) -> Any:
            return Lazy(budget, iter(values))

        @pass_context
        def made(_context: Context, value: Any) -> Any:
            return budget.made(value)

        return {" plain": plain, " text": text, " data": data, " each": each, " made": made}

    @pass_context
    def _finalize(self, _context: Context, value: Any) -> Any:
        """Called for every value that is printed."""
        budget = self.budget
        budget.step()
        if isinstance(value, Undefined):
            return value
        size = budget.text_length(value)
        budget.fits(size)
        budget.charge(size)
        return value

    def call_binop(self, _context: Context, operator: str, left: Any, right: Any) -> Any:
        return guards.binary(self.budget, operator, left, right)

    def getattr(self, obj: Any, attribute: str) -> Any:
        self.budget.step()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        self.budget.step()
        if type(argument) not in SCALARS:
            self.budget.check(argument)
        return super().getitem(obj, argument)

    def wrap_str_format(self, value: Any) -> Any:
        if not isinstance(value, MethodType | BuiltinMethodType) or value.__name__ not in {"format", "format_map"}:
            return None
        text = value.__self__
        if not isinstance(text, str):
            return None
        return guards.SafeFormat(self, self.budget, text, from_map=value.__name__ == "format_map")

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return super().is_safe_attribute(obj, attr, value) and attr in _attributes(obj, attr)

    def is_safe_callable(self, obj: Any) -> bool:
        if id(obj) in self._callables or isinstance(
            obj, Macro | LoopContext | BlockReference | guards.SafeFormat | Undefined
        ):
            return True
        if isinstance(obj, MethodType | BuiltinMethodType):
            owner, name = obj.__self__, obj.__name__
            return isinstance(owner, GenerationExtension) or name in _attributes(owner, name)
        return False

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        if not self.is_safe_callable(obj):
            raise jinja2.exceptions.SecurityError(f"{printable(type(obj).__name__)} is not safely callable")
        budget = self.budget
        budget.enter()
        try:
            if isinstance(obj, MethodType | BuiltinMethodType):
                if isinstance(obj.__self__, str):
                    for internal in ("_loop_vars", "_block_vars"):  # Jinja's own, which `context.call` would take out
                        kwargs.pop(internal, None)
                    return guards.call_text_method(budget, obj, args, kwargs)
                for value in args:
                    budget.check(value)
                if isinstance(obj.__self__, list | tuple):
                    budget.check(obj.__self__)
            elif isinstance(obj, LoopContext) and args:
                args = (budget.each(args[0]), *args[1:])
            elif isinstance(obj, TemplateDict) or obj is TemplateNamespace:
                for value in args:
                    if not isinstance(value, dict):
                        budget.check(value)
            return budget.made(context.call(obj, *args, **kwargs))
        finally:
            budget.leave()


def _raise_exception(message: object = "") -> None:
    raise RefusedError(printable(message) or "the chat template refused the conversation", "")


def _attributes(obj: Any, attr: str) -> frozenset[str]:
    """The attributes of `obj` a template may use."""
    if isinstance(obj, str):
        return guards.STR_METHODS
    if isinstance(obj, dict):
        return _DICT
    if isinstance(obj, tuple) and hasattr(obj, "_fields"):
        return frozenset(obj._fields) | _SEQUENCE
    for kinds, allowed in (
        ((list, tuple, range), _SEQUENCE),
        ((int, float), _NUMBER),
        ((LoopContext,), _LOOP),
        ((Macro,), _MACRO),
        ((BlockReference,), frozenset({"super"})),
        ((TemplateDict,), frozenset({"fromkeys"})),
        ((Namespace, Undefined), frozenset({attr})),
    ):
        if isinstance(obj, kinds):
            return allowed
    return frozenset()


def parse(source: str, limits: Limits) -> nodes.Template:
    """The syntax tree of a template; raises `TemplateError`."""
    if len(source) > limits.source_chars:
        raise exceeded(f"has {len(source)} characters", f"{limits.source_chars}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # odd escapes in a template's strings are not our code's
            tree = TemplateEnvironment(Budget(limits)).parse(source)
        check_size(tree)
    except jinja2.TemplateSyntaxError as error:
        raise TemplateError(
            f"the chat template has a syntax error in line {error.lineno}: {printable(error.message)}", ADVICE
        ) from error
    except FAULTS as error:
        raise _translated(error, 0) from error
    return tree


def compile_tree(tree: nodes.Template, limits: Limits) -> CodeType:
    """Hardened code of a parsed template (which is used up); raises `TemplateError`."""
    try:
        return TemplateEnvironment(Budget(limits)).compile(harden(tree), filename="<chat template>")
    except FAULTS as error:
        raise _translated(error, 0) from error


def run(code: CodeType, variables: Mapping[str, Any], budget: Budget, now: Callable[[], datetime]) -> str:
    """What the template prints; raises `RefusedError` or `TemplateError`, and nothing else."""
    environment = TemplateEnvironment(budget, now)
    template = jinja2.Template.from_code(environment, code, environment.make_globals(None))
    pieces: list[str] = []
    size = 0
    try:
        for piece in template.root_render_func(template.new_context(dict(variables))):
            pieces.append(piece)
            size += len(piece)
            budget.fits(size)
    except EdgellamaError:
        raise
    except FAULTS as error:
        raise _translated(error, _line(error, template)) from error
    return _valid("".join(pieces))


def _valid(text: str) -> str:
    """`text` with half surrogate pairs, which no encoding can carry, as U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _line(error: BaseException, template: jinja2.Template) -> int:
    """The template's line an error came from, 0 when unknown."""
    line = 0
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<chat template>":
            line = template.get_corresponding_lineno(trace.tb_lineno)
        trace = trace.tb_next
    return line


def _translated(error: BaseException, line: int) -> TemplateError:
    where = f" in line {line}" if line else ""
    if isinstance(error, RecursionError):
        return exceeded(f"is nested or calls itself too deeply{where}", "the interpreter's stack")
    if isinstance(error, MemoryError):
        return exceeded(f"needs too much memory{where}", "this process")
    if isinstance(error, jinja2.exceptions.SecurityError):
        return TemplateError(f"the chat template does something forbidden{where}: {printable(error)}", ADVICE)
    kind = "" if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: "
    return TemplateError(
        f"the chat template failed{where}: {kind}{printable(error)}",
        "the conversation has something the template does not expect; try another chat template",
    )
