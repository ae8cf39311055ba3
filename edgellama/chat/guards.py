"""Checks in front of the operators, methods and filters whose result can be larger or slower than their operands."""

from __future__ import annotations

import functools
import json
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from jinja2.sandbox import SandboxedEnvironment, SandboxedEscapeFormatter, SandboxedFormatter
from markupsafe import Markup

from edgellama.chat.limits import ADVICE, Budget, exceeded
from edgellama.errors import TemplateError

MAX_WIDTH = 1000
"""Widest field of a format specification, indent and the like."""
MAX_SLOW_CHARS = 8000
"""Longest text for filters whose run time grows with its square."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


STR_METHODS = _words("""
    capitalize casefold center count endswith expandtabs find format format_map index isalnum isalpha isascii
    isdecimal isdigit isidentifier islower isnumeric isprintable isspace istitle isupper join ljust lower lstrip
    partition removeprefix removesuffix replace rfind rindex rjust rpartition rsplit rstrip split splitlines
    startswith strip swapcase title upper zfill
""")
"""Methods of a string a template may call; the rest (`translate`, `encode`, …) is not needed for prompts."""

_OPERATORS: Mapping[str, Callable[[Any, Any], Any]] = MappingProxyType(
    {
        "+": operator.add,
        "-": operator.sub,
        "*": operator.mul,
        "/": operator.truediv,
        "//": operator.floordiv,
        "**": operator.pow,
        "%": operator.mod,
    }
)


def binary(budget: Budget, symbol: str, left: Any, right: Any) -> Any:
    """`left <symbol> right`, refused when the result would be too large."""
    budget.step()
    if symbol == "%" and isinstance(left, str):
        percent(budget, left, right)
    elif symbol == "*":
        for text, times in ((left, right), (right, left)):
            if isinstance(text, str | list | tuple) and isinstance(times, int):
                budget.fits(len(text) * times)
                if not isinstance(text, str):
                    budget.count(len(text) * times)
    elif symbol == "+" and isinstance(left, str) and isinstance(right, str):
        budget.fits(len(left) + len(right))
    elif symbol == "**" and isinstance(left, int) and isinstance(right, int) and abs(left) > 1 and right > 64:
        raise exceeded("computes a huge number", "64 bits")
    return budget.made(_OPERATORS[symbol](left, right))


def percent(budget: Budget, template: str, values: Any) -> None:
    """Check `template % values`."""
    fields = template.count("%")
    if len(template) > MAX_SLOW_CHARS or fields > MAX_WIDTH:
        raise exceeded("formats with a huge pattern", f"{MAX_SLOW_CHARS} characters, {MAX_WIDTH} fields")
    for match in re.finditer(r"%(?:\([^)]*\))?[#0\- +]*(\*|\d+)?(?:\.(\*|\d+))?", template):
        for width in match.groups():
            if width is not None and (width == "*" or len(width) > 4 or int(width) > MAX_WIDTH):
                raise exceeded(f"formats with width {width[:20]}", str(MAX_WIDTH))
    budget.fits(len(template) + fields * (MAX_WIDTH + budget.text_length(values)))


# ---- methods of text


def _pad(budget: Budget, _text: str, width: Any = 0, *_fill: Any) -> None:
    if isinstance(width, int):
        budget.fits(width)


def _expandtabs(budget: Budget, text: str, tabsize: Any = 8) -> None:
    if isinstance(tabsize, int):
        budget.fits(len(text) + text.count("\t") * max(tabsize, 0))


def _replace(budget: Budget, text: str, old: Any = "", new: Any = "", count: Any = -1) -> None:
    if isinstance(old, str) and isinstance(new, str):
        times = text.count(old)
        if isinstance(count, int) and count >= 0:
            times = min(times, count)
        budget.fits(len(text) + times * max(len(new) - len(old), 0))


def _strip(_budget: Budget, _text: str, chars: Any = None) -> None:
    if isinstance(chars, str) and len(chars) > MAX_WIDTH:
        raise exceeded(f"strips {len(chars)} different characters", str(MAX_WIDTH))


_METHODS: Mapping[str, Callable[..., None]] = MappingProxyType(
    {
        "center": _pad,
        "ljust": _pad,
        "rjust": _pad,
        "zfill": _pad,
        "expandtabs": _expandtabs,
        "replace": _replace,
        "strip": _strip,
        "lstrip": _strip,
        "rstrip": _strip,
    }
)


def call_text_method(budget: Budget, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a bound method of a string, refused when the result would be too large."""
    text: str = method.__self__  # type: ignore[attr-defined]
    name = method.__name__
    for value in (*args, *kwargs.values()):
        budget.check(value)
    if name == "join" and len(args) == 1:
        args = (joinable(budget, text, args[0]),)
    elif name in _METHODS:
        _METHODS[name](budget, text, *args, **kwargs)
    result = budget.made(method(*args, **kwargs))
    if isinstance(result, list):
        budget.charge(56 * len(result))
    return result


def joinable(budget: Budget, separator: Any, values: Iterable[Any]) -> list[Any]:
    """`values` as a list, refused when joining them would make too long a text."""
    items = budget.listed(values)
    budget.fits(sum(map(budget.text_length, items)) + budget.text_length(separator) * len(items))
    return items


class SafeFormat:
    """`str.format` and `str.format_map` with bounded widths and sandboxed attributes."""

    __slots__ = ("_formatter", "_map", "_text")

    def __init__(self, environment: SandboxedEnvironment, budget: Budget, text: str, *, from_map: bool) -> None:
        self._text = text
        self._map = from_map
        base = (
            _EscapeFormatter(environment, escape=text.escape) if isinstance(text, Markup) else _Formatter(environment)
        )
        base.budget = budget
        self._formatter = base

    def __call__(self, *args: Any, **kwargs: Any) -> str:
        if self._map:
            if kwargs or len(args) != 1:
                raise TypeError("format_map() takes exactly one argument")
            kwargs, args = args[0], ()
        return type(self._text)(self._formatter.vformat(self._text, args, kwargs))

    def __repr__(self) -> str:
        return "<method>"


class _Bounded(SandboxedFormatter):
    budget: Budget

    def format_field(self, value: Any, format_spec: str) -> Any:
        if any(len(digits) > 4 or int(digits) > MAX_WIDTH for digits in re.findall(r"\d+", format_spec)):
            raise exceeded(f"formats with {format_spec[:20]!r}", f"width {MAX_WIDTH}")
        self.budget.step()
        self.budget.fits(self.budget.text_length(value))
        return self.budget.made(super().format_field(value, format_spec))

    def convert_field(self, value: Any, conversion: Any) -> Any:
        self.budget.check(value)
        return super().convert_field(value, conversion)


class _Formatter(_Bounded):
    pass


class _EscapeFormatter(_Bounded, SandboxedEscapeFormatter):
    pass


# ---- filters


def tojson(
    budget: Budget,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as Hugging Face renders it: non-ASCII and HTML characters as they are, ", " and ": " between values."""
    weight = budget.weigh(value)
    step = indent if isinstance(indent, int) else len(indent or "")
    between = sum(map(len, separators)) if separators else 2
    if step > 64 or between > 64:
        raise exceeded("indents JSON too far", "64 characters")
    budget.fits(weight.chars + weight.nodes * (between + 24 + max(step, 0) * weight.depth))
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _filter_pad(budget: Budget, _value: Any, width: Any = 80) -> None:
    _pad(budget, "", width)


def _filter_indent(budget: Budget, value: Any, width: Any = 4, *_flags: Any, **_more: Any) -> None:
    size = width if isinstance(width, int) else budget.text_length(width)
    lines = len(value.splitlines()) if isinstance(value, str) else 1
    budget.fits(budget.text_length(value) + (lines + 1) * size)


def _filter_replace(budget: Budget, value: Any, old: Any, new: Any, count: Any = None) -> None:
    if not isinstance(value, str):
        budget.fits(budget.text_length(value) * (1 + budget.text_length(new)))
        return
    _replace(budget, value, str(old), str(new), -1 if count is None else count)


def _filter_group(budget: Budget, _value: Any, size: Any = None, *_fill: Any, **more: Any) -> None:
    for wanted in (size, *more.values()):
        if isinstance(wanted, int):
            budget.count(wanted)


def _filter_round(_budget: Budget, _value: Any, precision: Any = 0, *_method: Any, **_more: Any) -> None:
    if isinstance(precision, int) and abs(precision) > 64:
        raise exceeded(f"rounds to {precision} digits", "64")


def _filter_sum(_budget: Budget, _value: Any, _attribute: Any = None, start: Any = 0, **_more: Any) -> None:
    if not isinstance(start, int | float):
        raise TemplateError("the chat template sums values that are not numbers", ADVICE)


def _filter_format(budget: Budget, value: Any, *args: Any, **kwargs: Any) -> None:
    percent(budget, str(value), kwargs or args)


def _filter_slow(budget: Budget, value: Any, *args: Any, **_more: Any) -> None:
    if budget.text_length(value) > MAX_SLOW_CHARS or any(budget.text_length(x) > MAX_WIDTH for x in args):
        raise exceeded("reformats a long text", f"{MAX_SLOW_CHARS} characters")


def _filter_truncate(budget: Budget, _value: Any, *args: Any, **kwargs: Any) -> None:
    for extra in (*args, *kwargs.values()):
        budget.fits(budget.text_length(extra))


def _filter_trim(budget: Budget, _value: Any, chars: Any = None) -> None:
    _strip(budget, "", chars)


_FILTERS: Mapping[str, Callable[..., None]] = MappingProxyType(
    {
        "center": _filter_pad,
        "indent": _filter_indent,
        "replace": _filter_replace,
        "batch": _filter_group,
        "slice": _filter_group,
        "round": _filter_round,
        "sum": _filter_sum,
        "format": _filter_format,
        "trim": _filter_trim,
        "truncate": _filter_truncate,
        **dict.fromkeys(("wordwrap", "urlize", "striptags", "pprint"), _filter_slow),
    }
)

_SHALLOW = _words("""
    length count first last list map select reject selectattr rejectattr default d items attr reverse batch
    slice random
""")
"""Filters that never look into the values they are given."""
_CONSUMING = frozenset({"sort", "unique", "groupby", "max", "min", "sum"})
"""Filters that read the whole of an iterator in one go."""


def guarded_filter(budget: Budget, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with its operands checked, its result counted, and Jinja's pass-argument marks kept."""
    skip = 1 if hasattr(function, "jinja_pass_arg") else 0
    before = _FILTERS.get(name)

    @functools.wraps(function)
    def guarded(*given: Any, **kwargs: Any) -> Any:
        budget.step()
        head, args = given[:skip], given[skip:]
        if name in _CONSUMING and args and not isinstance(args[0], str | Mapping):
            args = (budget.listed(args[0]), *args[1:])
        if name == "join" and args and not isinstance(args[0], str):
            args = (joinable(budget, args[1] if len(args) > 1 else kwargs.get("d", ""), args[0]), *args[1:])
        if name not in _SHALLOW:
            for value in (*args, *kwargs.values()):
                budget.check(value)
        if before is not None:
            before(budget, *args, **kwargs)
        return budget.made(function(*head, *args, **kwargs))

    return guarded


def guarded_test(budget: Budget, function: Any) -> Callable[..., Any]:
    """A test with its step counted and its operands checked."""
    skip = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def guarded(*given: Any, **kwargs: Any) -> Any:
        budget.step()
        if len(given) > skip + 1:
            for value in given[skip:]:
                budget.check(value)
        return function(*given, **kwargs)

    return guarded
