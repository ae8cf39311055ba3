"""Compiled kernels: kept on disk, thrown away together whenever one of their sources changes.

Numba's own cache watches the file of the compiled function alone; these functions are mostly emitted by other files.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba as nb
from numba.core import caching

from edgellama.codecs import rounding

_OPERATION = nb.types.void(*[nb.types.int64] * 4)
_ROWS = nb.types.void(*[nb.types.int64] * 9)
_RUN = nb.types.boolean(*[nb.types.int64] * 7)


def helper(function: Callable[..., Any]) -> Any:
    """Part of a kernel, compiled only together with it."""
    return nb.njit(nogil=True, error_model="numpy")(function)


@functools.cache
def _stamp() -> bytes:
    """Hash over all sources of this folder and what they take from others."""
    digest = hashlib.sha256()
    for path in (*sorted(Path(__file__).parent.glob("*.py")), Path(rounding.__file__)):
        digest.update(path.read_bytes())
    return digest.digest()


class _Stamped:
    def get_source_stamp(self) -> bytes:
        return _stamp()


class _Provided(_Stamped, caching.UserProvidedCacheLocator):  # type: ignore[misc]
    pass


class _InTree(_Stamped, caching.InTreeCacheLocator):  # type: ignore[misc]
    pass


class _UserWide(_Stamped, caching.UserWideCacheLocator):  # type: ignore[misc]
    pass


class _Implementation(caching.CompileResultCacheImpl):  # type: ignore[misc]
    _locator_classes = (_Provided, _InTree, _UserWide)


class _Cache(caching.FunctionCache):  # type: ignore[misc]
    _impl_class = _Implementation

    def save_overload(self, sig: Any, data: Any) -> None:
        """A full disk or a folder that became read-only costs the next start its time, nothing else."""
        try:
            super().save_overload(sig, data)
        except OSError:
            self.disable()


def _cache(function: Callable[..., Any]) -> Any:
    try:
        return _Cache(function)
    except RuntimeError:  # no folder can be written
        return caching.NullCache()


@functools.cache
def _c_function(function: Callable[..., None], signature: Any) -> Any:
    """A C function of int64 arguments."""
    from numba.core.ccallback import CFunc

    made: Any = CFunc(function, (signature.args, signature.return_type), locals={}, options={"error_model": "numpy"})
    made._cache = _cache(function)
    made.compile()
    return made


def operation(function: Callable[..., None]) -> int:
    """Address of an operation of `ops.py`, compiled now unless it was before."""
    return int(_c_function(function, _OPERATION).address)


def rows(function: Callable[..., None]) -> int:
    """Address of a kernel of `rows.py`, compiled now unless it was before."""
    return int(_c_function(function, _ROWS).address)


@functools.cache
def interpreter() -> Callable[[int, int, int, int, int, int, int], bool]:
    """`interpreter.run`, compiled now unless it was before."""
    from edgellama.engine.jit.kernels.interpreter import run

    made = nb.njit(nogil=True, error_model="numpy")(run)
    made._cache = _cache(run)
    made.compile(_RUN)
    made.disable_compile()
    compiled: Callable[[int, int, int, int, int, int, int], bool] = made
    return compiled


def prepare() -> None:
    """Load all kernels, compiling those that are not on disk yet.

    A confined process calls this before it gives up writing; later it would compile in vain at every start.
    """
    from edgellama.engine.jit.kernels import gemm, ops
    from edgellama.engine.jit.kernels.rows import KERNELS

    interpreter()
    for function in ops.OPERATIONS:
        operation(function)
    tiles = {tile for kind in KERNELS if (tile := gemm.tiles(kind)) is not None}
    for kernel in (gemm.unpack_rows, *tiles, *KERNELS.values()):
        rows(kernel)
