"""One way to compile a kernel: cached on disk, without the interpreter lock, dividing by zero as IEEE 754 says.

Numba takes a cached kernel as fresh while the kernel's own file is unchanged. What a kernel calls lies in other files
too, so here a cached kernel is fresh while all files of this room are.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numba as nb
from numba.extending import intrinsic as _intrinsic

Function = TypeVar("Function", bound=Callable[..., Any])


@functools.cache
def _stamp() -> str:
    digest = hashlib.blake2b(digest_size=16)
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def kernel(function: Function) -> Function:
    """Compile at the first call for the argument types it gets. Where no folder can be written, nothing is cached."""
    dispatcher: Any = nb.njit(nogil=True, error_model="numpy")(function)
    try:
        dispatcher.enable_caching()
    except (RuntimeError, OSError):
        return cast(Function, dispatcher)
    cache_file = dispatcher._cache._cache_file  # there is no public way to say what a cached function depends on
    cache_file._source_stamp = (cache_file._source_stamp, _stamp())
    return cast(Function, dispatcher)


def intrinsic(function: Function) -> Any:
    """Let `function` emit the code of a call (numba.extending.intrinsic, typed)."""
    return _intrinsic(function)
