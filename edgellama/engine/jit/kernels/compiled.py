"""Kernels as C function pointers, compiled when a program first needs them and kept on disk."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numba as nb

_OPERATION = nb.types.void(*[nb.types.int64] * 4)
_ROWS = nb.types.void(*[nb.types.int64] * 9)


@functools.cache
def _compiled(function: Callable[..., None], signature: Any) -> Any:
    return nb.cfunc(signature, nopython=True, cache=True, error_model="numpy")(function)


def operation(function: Callable[..., None]) -> int:
    """Address of an operation of `ops.py`."""
    return int(_compiled(function, _OPERATION).address)


def rows(function: Callable[..., None]) -> int:
    """Address of a kernel of `rows.py`."""
    return int(_compiled(function, _ROWS).address)
