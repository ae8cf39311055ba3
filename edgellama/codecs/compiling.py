"""One way to compile a kernel: cached on disk, without the interpreter lock, dividing by zero as IEEE 754 says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba as nb
from numba.extending import intrinsic as _intrinsic

Function = TypeVar("Function", bound=Callable[..., Any])


def kernel(function: Function) -> Function:
    """Compile at the first call for the argument types it gets."""
    return cast(Function, nb.njit(nogil=True, cache=True, error_model="numpy")(function))


def intrinsic(function: Function) -> Any:
    """Let `function` emit the code of a call (numba.extending.intrinsic, typed)."""
    return _intrinsic(function)
