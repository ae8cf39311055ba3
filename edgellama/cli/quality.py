"""`edgellama quantize` towards a goal: the optimizer, with an engine to measure its trial files, and its report."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgellama import __version__
from edgellama.cli.common import Output

if TYPE_CHECKING:
    from edgellama.quantize.optimize import Goal, Plan
    from edgellama.quantize.options import Options

SIDECAR = ".decisions.json"
CONTEXT = 512


def goal_of(size: int | None, bits: float | None, kld: float | None) -> Goal | None:
    """The goal that was asked for, None when there is none."""
    from edgellama.quantize.optimize import Goal

    if size is None and bits is None and kld is None:
        return None
    return Goal(size, bits, kld)


def decide(
    out: Output, source: Path, target: Path, options: Options, goal: Goal, effort: str, text: Path | None, chunks: int
) -> Plan:
    """Choose a type for every tensor; with a calibration text, by measuring."""
    from edgellama.quantize.optimize import Optimizer

    folder = target.absolute().parent
    folder.mkdir(parents=True, exist_ok=True)
    if text is None:
        out.notice("no --text is given: the types are chosen without measuring what they do to the model")
    with (
        (
            contextlib.nullcontext(None)
            if text is None
            else measuring(source, text, chunks, options.threads, folder, out)
        ) as kld,
        out.progress("choosing types") as bar,
    ):
        optimizer = Optimizer(
            source,
            options,
            effort=effort,
            measure_kld=kld,
            workspace=folder,
            on_step=lambda fraction, what: bar.update(fraction, 1.0, what),
        )
        return optimizer.run(goal)


@contextlib.contextmanager
def measuring(
    source: Path, text: Path, chunks: int, threads: int, folder: Path, out: Output
) -> Iterator[Callable[[Path], float]]:
    """A function that measures a file's divergence from `source`; the distributions to compare with live as long."""
    from edgellama.cli.engine_options import EngineChoice
    from edgellama.cli.measuring import measuring_options, run_job
    from edgellama.evaluate.jobs import DivergenceJob, PerplexityJob
    from edgellama.evaluate.process import measure

    options = measuring_options(source, EngineChoice(threads=threads or None, own=True), CONTEXT)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".edgellama-base-") as place:
        base = str(Path(place) / "base.logits")
        model = str(source.absolute())
        run_job(
            PerplexityJob(model=model, options=options, text=str(text), chunks=chunks, save_logits=base),
            out,
            "the source on the calibration text",
        )

        def kld(path: Path) -> float:
            return measure(DivergenceJob(model=str(path), options=options, base=base)).figures["kld_mean"]

        yield kld


def with_plan(options: Options, plan: Plan) -> Options:
    """Options that carry the plan out."""
    return replace(options, recipe=plan.recipe, types=plan.types)


def report(out: Output, plan: Plan) -> None:
    """The decision table, by group; each tensor with --verbose."""
    groups: dict[str, list[Any]] = {}
    for row in plan.rows:
        groups.setdefault(row.group, []).append(row)
    total = sum(row.loss for row in plan.rows) or 1.0
    out.notice(f"{'tensors':24} {'types':44} {'bytes':>14} {'share of loss':>14}")
    for name, rows in groups.items():
        counts: dict[str, int] = {}
        for row in rows:
            counts[row.type.name] = counts.get(row.type.name, 0) + 1
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items(), key=lambda item: -item[1]))
        loss = sum(row.loss for row in rows)
        out.notice(f"{name:24} {kinds:44} {sum(row.nbytes for row in rows):14,} {loss / total:14.1%}")
    for row in plan.rows:
        out.detail(f"{row.name:40} {row.type.name:8} {row.nbytes:14,} error {row.error:.3e} loss {row.loss:.3e}")
    if plan.measured_kld is not None:
        out.notice(f"KL divergence on the calibration text: {plan.measured_kld:.5f}")


def write_sidecar(target: Path, plan: Plan, settings: dict[str, Any]) -> Path:
    """Keep the decisions beside the file: the same settings give the same decisions again."""
    from edgellama.files import write_text

    path = target.with_name(target.name + SIDECAR)
    record = {"edgellama": __version__, **settings, **plan.record()}
    write_text(path, json.dumps(record, indent=1) + "\n")
    return path
