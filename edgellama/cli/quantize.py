"""`edgellama quantize`: a GGUF model in, a smaller one out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgellama.cli.common import Output
from edgellama.cli.common import command as declare
from edgellama.errors import UsageError

if TYPE_CHECKING:
    from edgellama.quantize.options import Options, Result

_SIZES = {"K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def parse_size(text: str) -> int:
    """Bytes of `4.5GB`, `300M`, `2GiB` or a plain number. Raises UsageError."""
    word = text.strip().upper().removesuffix("B")
    number = word.rstrip("KMGTI")
    try:
        size = int(float(number) * _SIZES.get(word[len(number) :], 1 if word == number else 0))
    except ValueError:
        size = 0
    if size <= 0:
        raise UsageError(f"{text!r} is no size", "write it like 4.5GB, 300MB or 2GiB")
    return size


@declare(name="quantize", example="edgellama quantize model-bf16.gguf model-q4.gguf --recipe Q4_K_M")
@click.argument("source", required=False)
@click.argument("target", required=False, type=click.Path(path_type=Path))
@click.option("--recipe", default="Q4_K_M", show_default=True, help="The mix of tensor types; see --list.")
@click.option("--list", "list_recipes", is_flag=True, help="List the recipes and end.")
@click.option("--target-size", metavar="SIZE", help="Choose types so that the file has at most this size: 4.5GB.")
@click.option("--target-bpw", type=float, metavar="BITS", help="Choose types for so many bits per weight.")
@click.option("--max-kld", type=float, metavar="KLD", help="The smallest file that diverges no more (needs --text).")
@click.option(
    "--effort",
    type=click.Choice(["quick", "normal", "high", "max"]),
    default="normal",
    show_default=True,
    help="How finely a goal is searched for.",
)
@click.option("--text", type=click.Path(path_type=Path), help="Calibration text to measure on, for a goal.")
@click.option("--text-chunks", type=click.IntRange(1), default=8, show_default=True, help="Chunks of it to measure on.")
@click.option(
    "--protect",
    is_flag=False,
    flag_value="q8",
    metavar="[q8|f16]",
    help="Keep embeddings, output and the outermost attention at higher precision.",
)
@click.option("--imatrix", type=click.Path(path_type=Path), help="Importance matrix (.gguf or .dat).")
@click.option("--include-weights", multiple=True, metavar="TEXT", help="Use importance only for names with TEXT.")
@click.option("--exclude-weights", multiple=True, metavar="TEXT", help="Use no importance for names with TEXT.")
@click.option("--threads", type=click.IntRange(0), default=0, help="Threads; 0 takes every core.")
@click.option("--resume", is_flag=True, help="Go on where an interrupted run stopped.")
@click.option("--dry-run", is_flag=True, help="Decide and print, write nothing.")
@click.option("--pure", is_flag=True, help="One type for all tensors, without the recipe's mix.")
@click.option("--tensor-type", "tensor_types", multiple=True, metavar="REGEX=TYPE", help="Type of matching tensors.")
@click.option("--tensor-type-file", type=click.Path(path_type=Path), help="File of REGEX=TYPE words.")
@click.option("--output-tensor-type", metavar="TYPE", help="Type of output.weight.")
@click.option("--token-embedding-type", metavar="TYPE", help="Type of the token embeddings.")
@click.option("--leave-output-tensor", is_flag=True, help="Keep output.weight as it is.")
@click.option("--allow-requantize", is_flag=True, help="Quantize tensors that are quantized already.")
@click.option("--keep-split", is_flag=True, help="As many files as the source has.")
@click.option("--split-max-size", metavar="SIZE", help="Split into files of at most this much data.")
@click.option("--prune-layers", metavar="N,N", help="Leave these layers out.")
@click.option("--override-kv", multiple=True, metavar="KEY=TYPE:VALUE", help="Set a metadata value.")
def command(
    out: Output, *, source: str | None, target: Path | None, list_recipes: bool, dry_run: bool, **given: Any
) -> None:
    """Quantize SOURCE into TARGET.

    Files are byte-identical to llama-quantize's of the same recipe. An existing TARGET is replaced on success only; an
    interrupted run leaves a part file beside it that --resume goes on with.

    With --target-size, --target-bpw or --max-kld a type is chosen for every tensor: by the error it makes, weighted
    with --imatrix, and by what that does to the model's answers to --text. The result is an ordinary GGUF file; the
    decisions are kept in TARGET.decisions.json.
    """
    if list_recipes:
        _list(out)
        return
    if source is None or (target is None and not dry_run):
        raise UsageError("SOURCE and TARGET are needed", "`edgellama quantize --help` explains the options")
    from edgellama.quantize.api import Job
    from edgellama.quantize.protect import PROTECTIONS

    place = target or Path("dry-run.gguf")
    options, settings = _towards_goal(out, Path(source), place, _options(given), given, keep=not dry_run)
    job = Job(source, place, options)
    for warning in job.warnings:
        out.warn(warning)
    if options.protect is not None:
        plain = Job(source, place, replace(options, protect=None))
        cost = sum(output.size for output in job.outputs) - sum(output.size for output in plain.outputs)
        out.notice(f"--protect {options.protect}: {PROTECTIONS[options.protect].note}; that costs {cost:,} bytes")
    if dry_run:
        _report(out, job.plan(), table=True)
        return
    try:
        with out.progress(f"quantizing to {job.recipe.name}") as bar:
            result = job.run(lambda fraction, tensor: bar.update(fraction, 1.0, tensor))
    except KeyboardInterrupt:
        out.notice("stopped: the same command with --resume goes on from here")
        raise
    if settings is not None:
        settings()
    _report(out, result, table=False)


def _towards_goal(
    out: Output, source: Path, target: Path, options: Options, given: dict[str, Any], *, keep: bool
) -> tuple[Options, Callable[[], object] | None]:
    """Options that reach the goal, and what writes the sidecar; the options as they are when there is no goal."""
    from edgellama.cli import quality

    size = parse_size(given["target_size"]) if given["target_size"] else None
    goal = quality.goal_of(size, given["target_bpw"], given["max_kld"])
    if goal is None:
        return options, None
    effort, text, chunks = given["effort"], given["text"], given["text_chunks"]
    plan = quality.decide(out, source, target, options, goal, effort, text, chunks)
    quality.report(out, plan)
    names = ("target_size", "target_bpw", "max_kld", "effort", "text", "text_chunks", "imatrix", "protect")
    settings = {"source": str(source)} | {name: given[name] and str(given[name]) for name in names}
    return quality.with_plan(options, plan), (lambda: quality.write_sidecar(target, plan, settings)) if keep else None


def _options(given: dict[str, Any]) -> Options:
    from edgellama.quantize.choice import Overrides
    from edgellama.quantize.options import Options
    from edgellama.quantize.recipes import tensor_type

    words = list(given["tensor_types"])
    if given["tensor_type_file"] is not None:
        words += _words_of(given["tensor_type_file"])
    patterns = []
    for word in words:
        regex, separator, kind = word.partition("=")
        if not separator or not regex or not kind:
            raise UsageError(f"--tensor-type {word!r} is not REGEX=TYPE", "for example attn_v=q6_k")
        patterns.append((regex.lower(), tensor_type(kind)))
    output, embedding = given["output_tensor_type"], given["token_embedding_type"]
    return Options(
        recipe=given["recipe"],
        overrides=Overrides(
            pure=given["pure"],
            leave_output=given["leave_output_tensor"],
            output_type=tensor_type(output) if output else None,
            embedding_type=tensor_type(embedding) if embedding else None,
            patterns=tuple(patterns),
        ),
        imatrix=given["imatrix"],
        include_weights=given["include_weights"],
        exclude_weights=given["exclude_weights"],
        prune_layers=_layers(given["prune_layers"]),
        override_kv=given["override_kv"],
        keep_split=given["keep_split"],
        split_max_bytes=parse_size(given["split_max_size"]) if given["split_max_size"] else None,
        allow_requantize=given["allow_requantize"],
        protect=given["protect"],
        threads=given["threads"],
        resume=given["resume"],
    )


def _words_of(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--tensor-type-file {path}: {error}") from error


def _layers(text: str | None) -> tuple[int, ...]:
    try:
        return tuple(sorted({int(word) for word in text.split(",")})) if text else ()
    except ValueError:
        raise UsageError(f"--prune-layers {text!r} is no list of layer numbers", "for example 20,21,22") from None


def _list(out: Output) -> None:
    from edgellama.codecs.base import codecs
    from edgellama.quantize.recipes import RECIPES

    own = {codec.type.name for codec in codecs().values() if not codec.native}
    rows = []
    for recipe in RECIPES.values():
        note = recipe.note if recipe.copies or recipe.base.name in own else f"{recipe.note}; by llama.cpp's own kernels"
        rows.append({"name": recipe.name, "file_type": recipe.file_type, "base": recipe.base.name, "note": note})
    if out.json:
        out.object({"recipes": rows})
        return
    for row in rows:
        out.line(f"{row['name']:10} {row['note']}")


def _report(out: Output, result: Result, *, table: bool) -> None:
    from edgellama.quantize import layout

    fallbacks = [decision for decision in result.decisions if decision.fell_back]
    if out.json:
        out.object(
            {
                "bytes": result.bytes,
                "source_bytes": result.source_bytes,
                "bits_per_weight": round(result.bits_per_weight, 4),
                "seconds": round(result.seconds, 3),
                "types": result.types,
                "fallback_tensors": len(fallbacks),
                "fallback_bytes": result.fallback_bytes,
                "files": [] if table else [str(path) for path in result.paths],
                "tensors": [
                    {
                        "name": d.tensor.name,
                        "shape": list(d.tensor.shape),
                        "from": d.tensor.type.name,
                        "to": d.type.name,
                    }
                    | {"bytes": layout.nbytes_as(d.tensor, d.type)}
                    for d in result.decisions
                ],
            }
        )
        return
    if table:
        for d in result.decisions:
            size = layout.nbytes_as(d.tensor, d.type)
            bits = size * 8 / d.tensor.elements
            shape = " x ".join(str(n) for n in d.tensor.shape)
            out.line(
                f"{d.tensor.name:40} {shape:>22} {d.tensor.type.name:>6} -> {d.type.name:8} {size:>14,} {bits:7.3f}"
            )
    counts = ", ".join(f"{count} {name}" for name, count in sorted(result.types.items(), key=lambda item: -item[1]))
    out.line(
        f"{result.source_bytes:,} -> {result.bytes:,} bytes, {result.bits_per_weight:.3f} bits per weight ({counts})"
        + ("" if table else f", {result.seconds:.1f} s")
    )
    if fallbacks:
        names = ", ".join(sorted({f"{d.wanted.name} -> {d.type.name}" for d in fallbacks}))
        out.warn(
            f"{len(fallbacks)} tensors have rows that do not divide into the recipe's blocks ({names}); "
            f"that costs {result.fallback_bytes:,} bytes"
        )
