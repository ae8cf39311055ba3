"""What the measuring process is asked and what it answers; JSON lines on its pipes."""

from __future__ import annotations

import msgspec

from edgellama.engine.base import EngineOptions


class _Job(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    model: str
    options: EngineOptions
    """`context_tokens` is the length of a chunk, `sequences` the chunks decoded together."""
    engine: str = "llamacpp"


class PerplexityJob(_Job, frozen=True, kw_only=True):
    """Perplexity of a text; `save_logits` also writes the distributions to a file."""

    text: str
    chunks: int = 0
    """0 takes the whole text."""
    save_logits: str | None = None


class DivergenceJob(_Job, frozen=True, kw_only=True):
    """Divergence from the distributions in the file `base`, over its own tokens."""

    base: str
    chunks: int = 0
    """0 takes every chunk of the file."""


class ImportanceJob(_Job, frozen=True, kw_only=True):
    """An importance matrix of a text, written to `output` now and then and at the end."""

    text: str
    output: str
    chunks: int = 0
    merge: tuple[str, ...] = ()
    """Matrices whose sums are added."""
    resume: bool = False
    """Go on with what `output` already holds of this text."""
    wanted: tuple[str, ...] = ()
    """Languages and kinds the text should hold: names of `coverage.NAMES`."""
    output_tensor: bool = False
    """Collect for output.weight too."""


Job = PerplexityJob | DivergenceJob | ImportanceJob


class Loading(msgspec.Struct, frozen=True, tag=True):
    """The model loads; a fraction of it is there."""

    fraction: float


class Progress(msgspec.Struct, frozen=True, tag=True):
    """`done` of `total` chunks are measured; what they say so far."""

    done: int
    total: int
    figures: dict[str, float] = {}


class Measured(msgspec.Struct, frozen=True, tag=True):
    """The end: figures, and what to tell beside them."""

    figures: dict[str, float]
    chunks: int
    context: int
    tokens: int
    """Positions that counted."""
    warnings: tuple[str, ...] = ()
    table: tuple[dict[str, float | str], ...] = ()
    """Importance matrices: statistics per tensor."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """It did not work: an error of edgellama's tree."""

    kind: str
    message: str
    advice: str = ""


Answer = Loading | Progress | Measured | Failed
decode_job = msgspec.json.Decoder(Job).decode
decode_answer = msgspec.json.Decoder(Answer).decode
