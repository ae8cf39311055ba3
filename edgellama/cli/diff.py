"""`edgellama diff`: what differs between two GGUF files."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from edgellama.cli.common import Output
from edgellama.cli.common import command as declare

if TYPE_CHECKING:
    from edgellama.quantize.compare import Comparison


@declare(name="diff", example="edgellama diff model-bf16.gguf model-q4.gguf")
@click.argument("a", metavar="A.gguf")
@click.argument("b", metavar="B.gguf")
@click.option("--threads", type=click.IntRange(0), default=0, help="Threads; 0 takes every core.")
@click.option("--all", "show_all", is_flag=True, help="List tensors that are equal too.")
def command(out: Output, *, a: str, b: str, threads: int, show_all: bool) -> None:
    """Compare two GGUF files: metadata, tensor types, and each tensor's error in B against A.

    The error is the root mean square of the difference, also relative to A's values, its largest magnitude, and the
    cosine between both. The files may be of any size: tensors are read in slabs.
    """
    from edgellama.quantize.compare import compare

    with out.progress("comparing") as bar:
        result = compare(a, b, threads=threads, on_progress=lambda done, name: bar.update(done, 1.0, name))
    if out.json:
        out.object(_fields(result))
    else:
        _report(out, result, show_all=show_all)


def _fields(result: Comparison) -> dict[str, object]:
    return {
        "same": result.same,
        "metadata": {key: [_plain(x) for x in pair] for key, pair in result.metadata.items()},
        "only_a": result.only_a,
        "only_b": result.only_b,
        "shapes": {name: [list(x), list(y)] for name, (x, y) in result.shapes.items()},
        "tensors": [
            {
                "name": t.name,
                "shape": list(t.shape),
                "types": list(t.types),
                "rmse": t.rmse,
                "relative_rmse": t.relative_rmse,
                "max": t.largest,
                "cosine": t.cosine,
            }
            for t in result.tensors
        ],
    }


def _plain(value: object) -> object:
    return value if isinstance(value, (str, int, bool, type(None))) else str(value)


def _report(out: Output, result: Comparison, *, show_all: bool) -> None:
    if result.same:
        out.line("the same model: equal metadata, types and values")
        return
    for key, (x, y) in result.metadata.items():
        out.line(f"{key}: {_word(x)} -> {_word(y)}")
    for names, which in ((result.only_a, "A"), (result.only_b, "B")):
        for name in names:
            out.line(f"{name}: only in {which}")
    for name, shapes in result.shapes.items():
        out.line(f"{name}: shape {shapes[0]} -> {shapes[1]}")
    changed = [t for t in result.tensors if show_all or not t.same or t.types[0] != t.types[1]]
    if changed:
        out.line(f"{'tensor':40} {'types':>16} {'RMSE':>12} {'relative':>9} {'max':>12} {'cosine':>10}")
    for t in changed:
        cosine = "-" if t.cosine is None else f"{t.cosine:.6f}"
        kinds = f"{t.types[0]} -> {t.types[1]}" if t.types[0] != t.types[1] else t.types[0]
        out.line(f"{t.name:40} {kinds:>16} {t.rmse:12.6g} {t.relative_rmse:9.3%} {t.largest:12.6g} {cosine:>10}")
    equal = len(result.tensors) - sum(not t.same for t in result.tensors)
    out.line(f"{equal} of {len(result.tensors)} common tensors have equal values")


def _word(value: object) -> str:
    text = "missing" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
