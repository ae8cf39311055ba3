"""What a chat template may spend: steps, CPU time, text and nesting. Templates come with models and are hostile.

The sandbox asks here before it makes anything whose size the template chooses, and at every step of a loop, call,
filter or attribute, so that no single operation is large and the sum of all of them is bounded.
"""

from __future__ import annotations

import time
from collections.abc import ItemsView, Iterable, Iterator, KeysView, ValuesView
from dataclasses import dataclass
from types import NoneType
from typing import Any, NamedTuple

from jinja2.utils import Namespace

from edgellama.errors import TemplateError

SCALARS = frozenset({str, int, float, bool, NoneType})
ADVICE = "use another chat template, or a model from a source you trust"
MAX_INT_BITS = 64


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one rendering. Those of text and items grow with the conversation, which the caller has accepted."""

    seconds: float = 2.0
    """CPU time of the rendering thread, so that a busy or sleeping machine does not fail a good template."""
    steps: int = 3_000_000
    text_chars: int = 1 << 20
    """Longest string, plus 12 characters per character of input (JSON may escape one into twelve)."""
    allocated: int = 64 << 20
    """Sum of everything ever made, in characters or bytes, plus 256 per character of input."""
    items: int = 100_000
    """Longest list or range, plus the input's own values."""
    depth: int = 100
    """Nesting of values."""
    calls: int = 60
    """Nesting of macro calls and recursive loops."""
    source_chars: int = 1 << 16


class Weight(NamedTuple):
    """A value seen as a tree: what is reachable twice counts twice, as it would when printed."""

    nodes: int
    chars: int
    depth: int


def exceeded(what: str, limit: str) -> TemplateError:
    """The error for a template that asks for more than it may have."""
    return TemplateError(f"the chat template {what} (limit: {limit})", ADVICE)


class Budget:
    """Counts what one rendering spends and raises `TemplateError` when it is too much. Belongs to one thread."""

    def __init__(self, limits: Limits, *, input_chars: int = 0, input_nodes: int = 0) -> None:
        self.limits = limits
        self.text_chars = limits.text_chars + 12 * input_chars
        self.items = limits.items + input_nodes
        self._left = limits.allocated + 256 * input_chars
        self._steps = limits.steps + 100 * input_nodes
        self._calls = 0
        self._deadline = time.monotonic() + limits.seconds
        self._cpu_deadline = time.thread_time() + limits.seconds

    def step(self) -> None:
        """One operation was done."""
        self._steps -= 1
        if self._steps < 0:
            raise exceeded("does not come to an end", f"{self.limits.steps} steps")
        if time.monotonic() > self._deadline and time.thread_time() > self._cpu_deadline:
            raise exceeded("takes too long", f"{self.limits.seconds:.2g} seconds")

    def enter(self) -> None:
        """A call begins."""
        self.step()
        self._calls += 1
        if self._calls > self.limits.calls:
            raise exceeded("calls itself too deeply", f"{self.limits.calls} calls inside each other")

    def leave(self) -> None:
        """A call ended."""
        self._calls -= 1

    def fits(self, chars: int) -> None:
        """Refuse before a text of `chars` characters is made."""
        if chars > self.text_chars or chars > self._left:
            raise exceeded(f"wants to make a text of {chars} characters", f"{min(self.text_chars, self._left)}")

    def charge(self, units: int) -> None:
        """Something of that size was made."""
        self._left -= units
        if self._left < 0:
            raise exceeded("makes too much text", f"{self.limits.allocated} characters and 256 per character of input")

    def count(self, items: int) -> None:
        """Refuse a list or range that is too long."""
        if items > self.items:
            raise exceeded(f"wants {items} items", f"{self.items}")

    def made(self, value: Any) -> Any:
        """Account for a new value and return it; iterators come back counted."""
        kind = type(value)
        if kind is int:
            if value.bit_length() > MAX_INT_BITS:
                raise exceeded("computes a huge number", f"{MAX_INT_BITS} bits")
        elif isinstance(value, str):
            self.fits(len(value))
            self.charge(len(value))
        elif isinstance(value, list | tuple):
            self.count(len(value))
            self.charge(8 * len(value))
        elif isinstance(value, dict):
            self.count(len(value))
            self.charge(64 * len(value))
        elif isinstance(value, Iterator) and kind is not Lazy:
            return Lazy(self, value)
        return value

    def check(self, value: Any) -> None:
        """Refuse a value that is too large or too deep to be printed, compared, hashed or copied in one go."""
        if type(value) not in SCALARS:
            self.weigh(value)

    def weigh(self, value: Any) -> Weight:
        """Size of `value` as a tree; raises `TemplateError` when it is over the bounds (cycles end there, too)."""
        nodes = chars = deepest = 0
        stack: list[tuple[Iterable[Any], int]] = [((value,), 0)]
        while stack:
            values, depth = stack.pop()
            deepest = max(deepest, depth)
            if depth > self.limits.depth:
                raise exceeded("makes values nested too deeply", f"{self.limits.depth} levels")
            for item in values:
                nodes += 1
                if nodes % 1000 == 0:
                    self.step()
                if isinstance(item, str):
                    chars += len(item)
                elif type(item) not in SCALARS:
                    inner = children(item)
                    if inner:
                        stack.append((inner, depth + 1))
                if nodes > 4 * self.items or chars > self.text_chars:
                    raise exceeded(
                        "makes a value that is too large", f"{4 * self.items} parts, {self.text_chars} letters"
                    )
        self.charge(nodes)
        return Weight(nodes, chars, deepest)

    def text_length(self, value: Any) -> int:
        """An upper estimate of `len(str(value))` that prints nothing."""
        if isinstance(value, str):
            return len(value)
        if type(value) in SCALARS:
            return 32
        weight = self.weigh(value)
        return 4 * weight.chars + 32 * weight.nodes

    def each(self, values: Iterable[Any]) -> Iterator[Any]:
        """`values`, with a step counted for each."""
        for value in values:
            self.step()
            yield value

    def listed(self, values: Iterable[Any]) -> list[Any]:
        """`values` as a list of bounded length."""
        result: list[Any] = []
        for value in self.each(values):
            result.append(value)
            self.count(len(result))
        self.charge(8 * len(result))
        return result


class Lazy:
    """An iterator a filter returned, counted as it is used. Templates see no attributes of it."""

    __slots__ = ("_budget", "_values")

    def __init__(self, budget: Budget, values: Iterator[Any]) -> None:
        self._budget = budget
        self._values = values

    def __iter__(self) -> Lazy:
        return self

    def __next__(self) -> Any:
        self._budget.step()
        return next(self._values)

    def __repr__(self) -> str:
        return "<generator>"


def children(value: Any) -> list[Any] | tuple[Any, ...]:
    """The values inside a container, none for anything else."""
    if isinstance(value, list | tuple):
        return value
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    if isinstance(value, set | frozenset | KeysView | ValuesView | ItemsView):
        return list(value)
    if isinstance(value, Namespace):
        attributes: dict[str, Any] = value._Namespace__attrs
        return [*attributes.keys(), *attributes.values()]
    return ()
