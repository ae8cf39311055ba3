"""`edgellama eval`: perplexity of a text, and KL divergence from another model's distributions."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from edgellama.cli.common import Output
from edgellama.cli.common import command as declare
from edgellama.cli.engine_options import EngineChoice, engine_options
from edgellama.errors import UsageError

if TYPE_CHECKING:
    from edgellama.evaluate.jobs import Measured

command = click.Group(
    "eval",
    help="Measure a model: perplexity of a text, KL divergence from another model.\n\nFigures are llama-perplexity's.",
    epilog="\b\nExample: edgellama eval ppl model-q4.gguf --text wiki.test.txt",
    no_args_is_help=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


@declare(name="ppl", example="edgellama eval ppl model-q4.gguf --text wiki.test.txt --chunks 20")
@click.argument("models", nargs=-1, required=True, metavar="MODEL...")
@click.option("--text", required=True, type=click.Path(path_type=Path), help="The text file to read.")
@click.option("--chunks", type=click.IntRange(0), default=0, help="Chunks of the text; 0 takes all.")
@click.option("--save-logits", type=click.Path(path_type=Path), metavar="FILE", help="Write the distributions to FILE.")
@engine_options
def _ppl(
    out: Output, *, models: tuple[str, ...], text: Path, chunks: int, save_logits: Path | None, engine: EngineChoice
) -> None:
    """Perplexity of a text, over the second half of each chunk of --ctx tokens (512).

    --save-logits writes the distributions as llama-perplexity does, for `edgellama eval kld --base`.
    """
    from edgellama.cli.measuring import DEFAULT_CONTEXT, locate, measuring_options, run_job
    from edgellama.evaluate.jobs import PerplexityJob

    if save_logits is not None and len(models) > 1:
        raise UsageError("--save-logits is for one model", "measure the models one by one")
    context = engine.ctx or DEFAULT_CONTEXT
    if save_logits is not None:
        save_logits.absolute().parent.mkdir(parents=True, exist_ok=True)
    for model in models:
        path, kind = locate(model, engine, out)
        begun = time.perf_counter()
        job = PerplexityJob(
            model=str(path.absolute()),
            engine=kind,
            options=measuring_options(path, engine, context),
            text=str(text),
            chunks=chunks,
            save_logits=str(save_logits) if save_logits else None,
        )
        measured = run_job(job, out, "perplexity")
        seconds = time.perf_counter() - begun
        if out.json:
            out.object(_fields(model, measured, seconds))
        else:
            ppl, error = measured.figures["ppl"], measured.figures["stderr"]
            name = f"{model}: " if len(models) > 1 else ""
            out.line(
                f"{name}perplexity {ppl:.4f} +/- {error:.5f} ({measured.chunks} chunks of {context}, {seconds:.1f} s)"
            )


@declare(name="kld", example="edgellama eval kld model-q4.gguf --base model-bf16.logits")
@click.argument("model")
@click.option(
    "--base", required=True, type=click.Path(path_type=Path), help="Distributions of the model to compare to."
)
@click.option("--chunks", type=click.IntRange(0), default=0, help="Chunks of the file; 0 takes all.")
@engine_options
def _kld(out: Output, *, model: str, base: Path, chunks: int, engine: EngineChoice) -> None:
    """KL divergence from the distributions in --base, which eval ppl --save-logits (or llama-perplexity) wrote.

    The text and the length of its chunks come from that file.
    """
    from edgellama.cli.measuring import locate, measuring_options, run_job
    from edgellama.evaluate.jobs import DivergenceJob
    from edgellama.evaluate.logits_file import LogitsFile

    with (opened := LogitsFile.open(base)).stream:
        context = opened.context
    if engine.ctx is not None and engine.ctx != context:
        raise UsageError(f"--ctx is {engine.ctx}, the chunks in {base} have {context} tokens", "leave --ctx out")
    path, kind = locate(model, engine, out)
    begun = time.perf_counter()
    job = DivergenceJob(
        model=str(path.absolute()),
        engine=kind,
        options=measuring_options(path, engine, context),
        base=str(base),
        chunks=chunks,
    )
    measured = run_job(job, out, "KL divergence")
    if out.json:
        out.object(_fields(model, measured, time.perf_counter() - begun))
        return
    f = measured.figures
    out.line(f"KL divergence   mean {f['kld_mean']:.6f} +/- {f['kld_stderr']:.6f}")
    out.line(f"                median {f['kld_median']:.6f}, 90 % {f['kld_90']:.6f}, 99 % {f['kld_99']:.6f}")
    out.line(f"                99.9 % {f['kld_999']:.6f}, maximum {f['kld_max']:.6f}")
    out.line(f"same top token  {f['top_agreement']:.3%} +/- {f['top_agreement_stderr']:.3%}")
    out.line(f"probability     RMS of the true token's change {f['p_diff_rms']:.3%} +/- {f['p_diff_rms_stderr']:.3%}")
    out.line(f"perplexity      {f['ppl']:.4f} +/- {f['ppl_stderr']:.5f}, base {f['ppl_base']:.4f}")
    out.line(f"                ln(ratio) {f['ln_ppl_ratio']:.6f} +/- {f['ln_ppl_ratio_stderr']:.6f}")


def _fields(model: str, measured: Measured, seconds: float) -> dict[str, object]:
    return {
        "model": model,
        **measured.figures,
        "chunks": measured.chunks,
        "ctx": measured.context,
        "positions": measured.tokens,
        "seconds": round(seconds, 3),
    }


command.add_command(_ppl)
command.add_command(_kld)
