"""`edgellama imatrix`: collect an importance matrix from a model that reads a text."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgellama.cli.common import Output
from edgellama.cli.common import command as declare
from edgellama.cli.engine_options import EngineChoice, engine_options
from edgellama.errors import UsageError

if TYPE_CHECKING:
    from edgellama.evaluate.jobs import Measured


@declare(name="imatrix", example="edgellama imatrix model-bf16.gguf --text calibration.txt --output imatrix.gguf")
@click.argument("model")
@click.option("--text", required=True, type=click.Path(path_type=Path), help="The calibration text.")
@click.option("--output", required=True, type=click.Path(path_type=Path), help="The matrix, in llama-imatrix's format.")
@click.option("--chunks", type=click.IntRange(0), default=0, help="Chunks of the text; 0 takes all.")
@click.option("--merge", multiple=True, type=click.Path(path_type=Path), metavar="FILE", help="Add another matrix.")
@click.option("--resume", is_flag=True, help="Go on where an interrupted run stopped.")
@click.option("--for", "wanted", multiple=True, metavar="NAME", help="Warn when the text lacks it: en, zh, code, ….")
@click.option("--process-output", is_flag=True, help="Collect for output.weight too.")
@engine_options
def command(
    out: Output,
    *,
    model: str,
    text: Path,
    output: Path,
    chunks: int,
    merge: tuple[Path, ...],
    resume: bool,
    wanted: tuple[str, ...],
    process_output: bool,
    engine: EngineChoice,
) -> None:
    """Let MODEL read --text and write how strongly each input of its weights is used, for `quantize --imatrix`.

    The unquantized model and text like that of its later use give the best matrix.
    """
    from edgellama.cli.measuring import DEFAULT_CONTEXT, locate, measuring_options, run_job
    from edgellama.evaluate.jobs import ImportanceJob

    names = _names(wanted)
    context = engine.ctx or DEFAULT_CONTEXT
    path, kind = locate(model, engine, out)
    output.absolute().parent.mkdir(parents=True, exist_ok=True)
    job = ImportanceJob(
        model=str(path.absolute()),
        engine=kind,
        options=measuring_options(path, engine, context, everything=True),
        text=str(text),
        output=str(output),
        chunks=chunks,
        merge=tuple(str(file) for file in merge),
        resume=resume,
        wanted=names,
        output_tensor=process_output,
    )
    measured = run_job(job, out, "importance matrix")
    for warning in measured.warnings:
        out.warn(warning)
    _report(out, measured, output)


def _names(wanted: tuple[str, ...]) -> tuple[str, ...]:
    from edgellama.evaluate.coverage import NAMES

    names = tuple(dict.fromkeys(name for word in wanted for name in word.lower().split(",") if name))
    for name in names:
        if name not in NAMES:
            raise UsageError(f"--for {name} is not known", f"known are {', '.join(NAMES)}")
    return names


def _report(out: Output, measured: Measured, output: Path) -> None:
    if out.json:
        out.object(
            {
                "file": str(output),
                "entries": len(measured.table),
                "chunks": measured.chunks,
                "ctx": measured.context,
                "tokens": measured.tokens,
                "warnings": list(measured.warnings),
                "tensors": list(measured.table),
            }
        )
        return
    out.line(f"{'layer':>6} {'sum of squares':>16} {'active':>8} {'entropy':>8} {'cosine to layer before':>23}")
    for layer, rows in _by_layer(measured.table).items():
        inputs = float(sum(row["inputs"] for row in rows))

        total, active, entropy, cosine = (
            sum(float(row.get(name, 0.0)) * row["inputs"] for row in rows) / inputs
            for name in ("sum", "active", "entropy_bits", "cosine")
        )
        out.line(f"{layer:>6} {total:16.2f} {active:8.2%} {entropy:8.3f} {cosine:23.4f}")
    if out.verbose:
        for row in measured.table:
            out.detail(f"{row['tensor']}: " + ", ".join(f"{k} {v:.4g}" for k, v in row.items() if isinstance(v, float)))
    out.line(f"{output}: {len(measured.table)} tensors, {measured.chunks} chunks of {measured.context} tokens")


def _by_layer(table: tuple[dict[str, Any], ...]) -> dict[str, list[dict[str, Any]]]:
    layers: dict[str, list[dict[str, Any]]] = {}
    for row in table:
        match = re.match(r"blk\.(\d+)\.", row["tensor"])
        layers.setdefault(match[1] if match else "-", []).append(row)
    return layers
