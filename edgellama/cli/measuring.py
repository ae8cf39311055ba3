"""What `eval`, `imatrix` and `quantize` share: engine options for measuring, and a job with its progress shown."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from edgellama.cli.common import Output
from edgellama.cli.engine_options import EngineChoice, load_settings, to_engine_options
from edgellama.cli.wiring import FAKE_SUFFIX, find_model
from edgellama.errors import UsageError

if TYPE_CHECKING:
    from edgellama.engine.base import EngineOptions
    from edgellama.evaluate.jobs import Job, Loading, Measured, Progress

DEFAULT_CONTEXT = 512
_FAKE_VOCABULARY = 512


def locate(model: str, engine: EngineChoice, out: Output) -> tuple[Path, str]:
    """The model's file, and the engine that takes it."""
    path = find_model(model, load_settings(engine), out).path
    return path, "fake" if path.name.endswith(FAKE_SUFFIX) else "llamacpp"


def measuring_options(path: Path, choice: EngineChoice, context: int, *, everything: bool = False) -> EngineOptions:
    """Engine options for chunks of `context` tokens; `everything` wants logits of all positions."""
    import msgspec

    from edgellama.evaluate import chunks

    if context < chunks.MIN_CONTEXT:
        raise UsageError(f"--ctx is {context}, at least {chunks.MIN_CONTEXT} tokens are needed")
    if choice.parallel is not None:
        raise UsageError("--parallel has no meaning here", "chunks are decoded together as memory allows")
    options = to_engine_options(load_settings(choice), choice)
    sequences = 1 if everything else chunks.sequences_at_once(context, _vocabulary(path))
    batch = min(context, chunks.BATCH_TOKENS) * sequences
    return msgspec.structs.replace(
        options,
        context_tokens=context,
        sequences=sequences,
        batch_tokens=batch,
        micro_batch_tokens=min(batch, 512),
        logits_rows=batch,
        unified_kv=False,
    )


def _vocabulary(path: Path) -> int:
    from edgellama.gguf_io import read

    if path.name.endswith(FAKE_SUFFIX):
        return _FAKE_VOCABULARY
    tokens = read(path).get("tokenizer.ggml.tokens")
    length = getattr(tokens, "length", None)
    return int(length) if length is not None else len(tokens) if isinstance(tokens, tuple) else _FAKE_VOCABULARY


def run_job(job: Job, out: Output, what: str) -> Measured:
    """Run a job and show how far it is."""
    from edgellama.evaluate.jobs import Loading
    from edgellama.evaluate.process import measure

    with out.progress("loading the model") as bar:

        def show(answer: Loading | Progress) -> None:
            if isinstance(answer, Loading):
                bar.update(answer.fraction, 1.0, "loading the model")
                return
            figures = ", ".join(
                f"{name.replace('kld_mean', 'KLD')} {value:.4f}" for name, value in answer.figures.items()
            )
            bar.update(answer.done, answer.total, f"{what}: chunk {answer.done} of {answer.total} {figures}".rstrip())

        return measure(job, show)
