"""The budgeted environment computes what Jinja's own sandbox computes, and holds its limits."""

# ruff: noqa: RUF005  (long lists, a few items a line)
from __future__ import annotations

import json
from typing import Any

import jinja2
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment

from edgellama.chat.limits import Budget, Limits
from edgellama.chat.templates import ChatTemplate
from edgellama.errors import TemplateError

REFERENCE = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
REFERENCE.filters["tojson"] = lambda value, **options: json.dumps(value, **{"ensure_ascii": False, **options})
DATA: dict[str, Any] = {
    "n": 7,
    "f": 2.5,
    "s": "Grüße <b> 中文",
    "e": "",
    "none": None,
    "l": [3, 1, 2],
    "w": ["b", "a", "C"],
    "d": {"b": 1, "a": [1, {"x": "y"}]},
    "objects": [{"k": "a", "v": 1}, {"k": "b", "v": 2}, {"k": "a", "v": 3}],
}

atoms = st.sampled_from(
    [
        "n",
        "f",
        "s",
        "e",
        "l",
        "w",
        "d",
        "objects",
        "missing",
        "1",
        "-3",
        "2.0",
        "'a'",
        "'b c'",
        "none",
        "true",
        "[]",
        "{}",
    ]
    + [
        "[1, 'x']",
        "(1, 2)",
        "{'k': s}",
        "range(4)",
        "s.upper()",
        "s.split()",
        "d.items()",
        "d.get('b')",
        "d.a[1].x",
        "l[1:]",
    ]
    + ["s[::-1]", "w[0]", "d['a']", "s | length", "namespace(a=1).a", "dict(a=1)"]
)
filters = st.sampled_from(
    [
        "upper",
        "lower",
        "title",
        "capitalize",
        "trim",
        "length",
        "first",
        "last",
        "list",
        "join",
        "join('-')",
        "sort",
        "reverse",
    ]
    + [
        "unique | list",
        "sum",
        "min",
        "max",
        "string",
        "int",
        "float",
        "abs",
        "round(1)",
        "tojson",
        "tojson(indent=2)",
        "e",
    ]
    + [
        "default('z', true)",
        "replace('a', 'bb')",
        "indent(2)",
        "center(20)",
        "batch(2) | list",
        "slice(2) | list",
        "items | list",
    ]
    + [
        "map('string') | list",
        "select | list",
        "reject('none') | list",
        "groupby('k') | list",
        "map(attribute='k') | join(',')",
    ]
    + [
        "selectattr('v', 'gt', 1) | list",
        "dictsort",
        "wordcount",
        "truncate(5)",
        "urlencode",
        "striptags",
        "attr('a')",
        "safe",
    ]
    + [
        "filesizeformat",
        "xmlattr",
        "format(1)",
        "escape",
        "wordwrap(5)",
        "pprint",
        "sort(attribute='v')",
        "sum(attribute='v')",
    ]
)
operators = st.sampled_from(
    ["+", "-", "*", "/", "//", "%", "**", "~", "==", "!=", "<", ">=", "in", "not in", "and", "or"]
)
tests = st.sampled_from(
    ["defined", "none", "string", "mapping", "iterable", "sequence", "number", "true", "odd", "eq(1)"]
)


def compound(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        st.tuples(inner, filters).map(lambda t: f"({t[0]}) | {t[1]}"),
        st.tuples(inner, operators, inner).map(lambda t: f"({t[0]}) {t[1]} ({t[2]})"),
        st.tuples(inner, tests).map(lambda t: f"({t[0]}) is {t[1]}"),
        st.tuples(inner, inner, inner).map(lambda t: f"({t[0]}) if ({t[1]}) else ({t[2]})"),
        st.tuples(inner, inner).map(lambda t: f"[{t[0]}, {t[1]}]"),
        st.tuples(inner, inner).map(lambda t: f"({t[0]})[{t[1]}]"),
        inner.map(lambda t: f"not ({t})"),
    )


expressions = st.recursive(atoms, compound, max_leaves=5)
statements = st.one_of(
    expressions.map(lambda e: f"{{{{ {e} }}}}"),
    expressions.map(
        lambda e: (
            f"{{% for x in {e} %}}{{{{ loop.index }}}}/{{{{ loop.length }}}}{{{{ x }}}};{{% else %}}no{{% endfor %}}"
        )
    ),
    expressions.map(lambda e: f"  {{% if {e} %}}\n yes\n  {{% else %}}no{{% endif %}}"),
    expressions.map(lambda e: f"{{% set v = {e} %}}{{{{ v }}}}{{{{ v }}}}"),
    expressions.map(lambda e: f"{{% macro m(a, b=2) %}}<{{{{ a }}}}{{{{ b }}}}>{{% endmacro %}}{{{{ m({e}) }}}}"),
    expressions.map(lambda e: f"{{% set v %}}x{{{{ {e} }}}}{{% endset %}}{{{{ v | length }}}}{{{{ v }}}}"),
    expressions.map(
        lambda e: f"{{% for x in [1, 2, 3] %}}{{% if x == 2 %}}{{% continue %}}{{% endif %}}{{{{ {e} }}}}{{% endfor %}}"
    ),
)


@settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(statements, min_size=1, max_size=3).map("".join))
def test_the_budget_changes_nothing(source: str) -> None:
    try:
        wanted: str | None = REFERENCE.from_string(source).render(**DATA)
    except (jinja2.TemplateError, ArithmeticError, TypeError, ValueError, LookupError, AttributeError, AssertionError):
        wanted = None
    try:
        found: str | None = ChatTemplate(source).render_dicts([], arguments=DATA)
    except TemplateError as error:
        found = None
        # Bounds on widths and kinds may refuse what Jinja computes; nothing else may.
        wanted = None if "limit:" in error.message or "not numbers" in error.message else wanted
    if found is None:
        assert wanted is None
        return
    assert found == wanted or "<generator" in found or " at 0x" in found


@pytest.mark.parametrize("attribute", ["encode", "translate", "maketrans", "__class__"])
def test_attributes_are_allowed_by_name(attribute: str) -> None:
    template = ChatTemplate("{{ 'x'." + attribute + " is defined }}")
    assert template.render_dicts([]) == "False"
    with pytest.raises(TemplateError, match="forbidden"):
        ChatTemplate("{{ 'x'." + attribute + "() }}").render_dicts([])


def test_limits_are_said_with_their_figures() -> None:
    limits = Limits(steps=1000)
    with pytest.raises(TemplateError, match="1000 steps") as caught:
        ChatTemplate("{% for i in range(99999) %}{% endfor %}", limits=limits).render_dicts([])
    assert caught.value.advice
    with pytest.raises(TemplateError, match="65536"):
        ChatTemplate("x" * 70_000)
    with pytest.raises(TemplateError, match=r"0\.05 seconds"):
        ChatTemplate("{% for i in range(99999) %}{{ i }}{% endfor %}", limits=Limits(seconds=0.05)).render_dicts([])


def test_the_budget_grows_with_the_conversation() -> None:
    text = "x" * 3_000_000
    template = ChatTemplate("{% for m in messages %}{{ m.content | upper | lower | replace('x', 'yy') }}{% endfor %}")
    assert len(template.render_dicts([{"role": "user", "content": text}])) == 6_000_000


def test_weights_see_values_as_trees() -> None:
    budget = Budget(Limits())
    assert budget.weigh(["ab", {"k": (1, "c")}]).chars == 4
    shared: list[Any] = ["ab"]
    for _ in range(10):
        shared = [shared, shared]
    assert budget.weigh(shared).chars == 2 * 2**10
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(TemplateError, match="nested"):
        budget.weigh(loop)
