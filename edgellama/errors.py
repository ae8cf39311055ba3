"""Every error edgellama raises on purpose, in one tree. The command line maps each class to its exit code.

    EdgellamaError              1   failed for a reason told
    ├── UsageError              2   wrong usage
    │   └── UnsupportedError    2   this runtime, engine or version cannot do that
    ├── NotFoundError           3   file or model not found
    ├── InvalidFileError        4   file invalid or hostile
    │   └── GGUFError           4   … with offset, field, found and expected
    ├── DoesNotFitError         5   memory, disk or context
    │   ├── MemoryShortageError 5
    │   ├── DiskFullError       5
    │   └── ContextOverflowError 5
    ├── EngineError             6   the engine failed
    │   ├── EngineLoadError     6   library or model could not be loaded
    │   ├── EngineCrashError    6   its process died or hung
    │   ├── NumericError        6   wrong or non-finite numbers
    │   ├── PoisonError         6   one request keeps killing its worker
    │   └── AbortedError        6   a decode was told to stop (never shown to a user)
    ├── NetworkError            1   the network answered with a failure
    │   └── OfflineError        7   the network is needed and not allowed
    ├── BusyError               1   the queue is full
    ├── LicenceError            8   licence not accepted
    ├── IncompleteError         9   answer cut inside a schema
    └── TemplateError           1   the chat template cannot render this conversation

A message says what happened, with the figures; `advice` says what to do next.
"""

from __future__ import annotations

from typing import ClassVar

EXIT_INTERRUPTED = 130


class EdgellamaError(Exception):
    """Base of the tree: `message` says what happened, `advice` what to do next (may be empty)."""

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, advice: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.advice = advice

    def __str__(self) -> str:
        return f"{self.message}\n{self.advice}" if self.advice else self.message


class UsageError(EdgellamaError):
    """An option or argument is wrong."""

    exit_code = 2


class UnsupportedError(UsageError):
    """The request is well formed, but this runtime, engine or version cannot do it."""


class NotFoundError(EdgellamaError):
    """A file, model or conversation does not exist."""

    exit_code = 3


class InvalidFileError(EdgellamaError):
    """A file is damaged, truncated or hostile."""

    exit_code = 4


class GGUFError(InvalidFileError):
    """A GGUF file breaks the format: where (`offset`, `field`), what was `found` and what was `expected`."""

    def __init__(self, path: str, offset: int, field: str, found: str, expected: str, advice: str = "") -> None:
        super().__init__(f"{path}: at byte {offset}, {field}: found {found}, expected {expected}", advice)
        self.path = path
        self.offset = offset
        self.field = field
        self.found = found
        self.expected = expected


class DoesNotFitError(EdgellamaError):
    """Memory, disk or context is too small for what was asked."""

    exit_code = 5


class MemoryShortageError(DoesNotFitError):
    """The model or its cache needs more memory than there is."""


class DiskFullError(DoesNotFitError):
    """The file system has less free space than the file needs."""


class ContextOverflowError(DoesNotFitError):
    """The prompt has `prompt_tokens` tokens, the sequence holds `limit_tokens`."""

    def __init__(self, prompt_tokens: int, limit_tokens: int, advice: str = "") -> None:
        super().__init__(f"the prompt has {prompt_tokens} tokens, the context holds {limit_tokens}", advice)
        self.prompt_tokens = prompt_tokens
        self.limit_tokens = limit_tokens


class EngineError(EdgellamaError):
    """The engine failed."""

    exit_code = 6


class EngineLoadError(EngineError):
    """The engine's library or the model could not be loaded."""


class EngineCrashError(EngineError):
    """The engine's process died or stopped making progress."""


class NumericError(EngineError):
    """The engine computed wrong or non-finite numbers."""


class PoisonError(EngineError):
    """One request kept killing its worker, also alone, and was given up; what it had produced is kept."""


class AbortedError(EngineError):
    """A decode was told to stop by `Engine.abort`."""


class NetworkError(EdgellamaError):
    """The network or the far side failed."""


class OfflineError(NetworkError):
    """The network is needed, but offline mode is on."""

    exit_code = 7


class BusyError(EdgellamaError):
    """The runtime's queue is full; later there is room again."""


class LicenceError(EdgellamaError):
    """The model's licence has not been accepted."""

    exit_code = 8


class IncompleteError(EdgellamaError):
    """The answer was cut while its schema was still open."""

    exit_code = 9


class TemplateError(EdgellamaError):
    """The chat template failed, took too long or refused the conversation."""


def _subclasses(base: type[EdgellamaError]) -> dict[str, type[EdgellamaError]]:
    found = {base.__name__: base}
    for child in base.__subclasses__():
        found.update(_subclasses(child))
    return found


def rebuild(kind: str, message: str, advice: str) -> EdgellamaError:
    """The error another process reported by class name; an unknown name becomes the base class."""
    cls = _subclasses(EdgellamaError).get(kind, EdgellamaError)
    error = cls.__new__(cls)
    EdgellamaError.__init__(error, message, advice)
    return error
