"""Room for the recursion of C++ regular expressions.

llama.cpp splits text for some vocabularies (DeepSeek, Falcon, …) with std::regex. libstdc++'s recurses once per
character of a match, with about 325 bytes of stack each, and ends the process when the stack is full: a run of 26,000
letters, as in a pasted file in base64, is enough for the usual 8 MiB.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import TypeVar

from edgellama.errors import MemoryShortageError, UsageError

_T = TypeVar("_T")
_SAFE_RUN = 1000
_BYTES_PER_CHARACTER = 1024
_BASE_BYTES = 1 << 20
MAX_RUN = 500_000
_RUNS = re.compile(r"\s+|\S+")
_starting = threading.Lock()


def longest_run(text: str) -> int:
    """Characters of the longest stretch of blanks or of anything else: no match is longer by more than a character."""
    if len(text) <= _SAFE_RUN:
        return len(text)
    return max((match.end() - match.start() for match in _RUNS.finditer(text)), default=0)


def call(function: Callable[[], _T], text: str) -> _T:
    """`function()`, on a thread with a stack as large as splitting `text` may need."""
    run = longest_run(text)
    if run <= _SAFE_RUN:
        return function()
    if run > MAX_RUN:
        raise UsageError(
            f"the text has {run:,} characters without a blank, {MAX_RUN:,} are the most",
            "leave out data that is no text",
        )
    return _on_a_thread(function, _BASE_BYTES + run * _BYTES_PER_CHARACTER)


def _on_a_thread(function: Callable[[], _T], stack_bytes: int) -> _T:
    results: list[_T] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            results.append(function())
        except BaseException as error:  # noqa: BLE001 - raised again by the caller's thread
            errors.append(error)

    with _starting:  # the size is a setting of the whole process
        before = threading.stack_size(-(-stack_bytes // 65536) * 65536)
        try:
            thread = threading.Thread(target=work, name="tokenize-long")
            thread.start()
        except RuntimeError as error:
            raise MemoryShortageError(f"a stack of {stack_bytes:,} bytes was refused by the system") from error
        finally:
            threading.stack_size(before)
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
