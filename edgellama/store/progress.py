"""What a pull tells about its progress. The command line draws it; the store only calls back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Stage = Literal["wait", "connect", "download", "verify", "extract", "copy", "notice"]


@dataclass(frozen=True, slots=True)
class Progress:
    """One step: `done_bytes` of `total_bytes` (None: unknown) of `file`. A "notice" carries only `text`."""

    stage: Stage
    file: str
    done_bytes: int = 0
    total_bytes: int | None = None
    text: str = ""


OnProgress = Callable[[Progress], None]


def silent(_progress: Progress) -> None:
    """Tell nobody."""


def notice(on_progress: OnProgress, file: str, text: str) -> None:
    """Tell a sentence about `file`."""
    on_progress(Progress("notice", file, text=text))
