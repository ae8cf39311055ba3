"""How a script stops: what happened, what to do, and the exit code of edgellama's contract."""

from __future__ import annotations

FAILED = 1
USAGE = 2
NO_SPACE = 5
ENGINE = 6
OFFLINE = 7
INTERRUPTED = 130


class SetupError(Exception):
    """The set-up cannot go on: `what` happened, `advice` lines (commands are indented), `tail` of the log."""

    def __init__(self, what: str, advice: list[str] | None = None, *, code: int = FAILED, tail: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.advice = advice or []
        self.code = code
        self.tail = tail

    def text(self) -> str:
        """All of it, for stderr."""
        parts = [self.tail.rstrip()] if self.tail else []
        return "\n".join([*parts, f"error: {self.what}", *self.advice])
