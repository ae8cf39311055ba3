"""A mirror of `ggml_tensor`, for looking at a graph's nodes while llama.cpp computes them.

The struct is internal to ggml and changes between versions, so `check` proves the mirror against the loaded library
before it is used: its size, the numbers of the operations, and a tensor that the library itself made.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellama.engine import ggml
from edgellama.errors import EngineLoadError

F32, I32 = 0, 26
MUL_MAT, MUL_MAT_ID = 29, 30
_OBJECT_BYTES = 32
_OPERATIONS = {MUL_MAT: b"MUL_MAT", MUL_MAT_ID: b"MUL_MAT_ID"}


class Tensor(ctypes.Structure):
    """`ggml_tensor` (ggml.h). `ne` are elements and `nb` strides in bytes per dimension, the contiguous one first."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * 4),
        ("nb", ctypes.c_size_t * 4),
        ("op", ctypes.c_int),
        ("op_params", ctypes.c_int32 * 16),
        ("flags", ctypes.c_int32),
        ("src", ctypes.c_void_p * 10),
        ("view_src", ctypes.c_void_p),
        ("view_offs", ctypes.c_size_t),
        ("data", ctypes.c_void_p),
        ("name", ctypes.c_char * 64),
        ("extra", ctypes.c_void_p),
        ("padding", ctypes.c_char * 8),
    )

    @classmethod
    def at(cls, address: int) -> Tensor:
        """The tensor at `address`, which must stay alive."""
        return cls.from_address(address)

    def source(self, index: int) -> Tensor | None:
        """The operand at that place, None where there is none."""
        address = self.src[index]
        return Tensor.at(address) if address else None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Elements per dimension, the contiguous one first."""
        return self.ne[0], self.ne[1], self.ne[2], self.ne[3]

    def read(self) -> NDArray[Any]:
        """A copy of the data, also from a device: float32 or int32[ne3, ne2, ne1, ne0]."""
        if self.type not in {F32, I32}:
            raise EngineLoadError(f"{self.name.decode(errors='replace')} has ggml type {self.type}, not F32 or I32")
        span = sum((n - 1) * stride for n, stride in zip(self.ne, self.nb, strict=True)) + 4
        raw = np.empty(span, np.uint8)
        ggml.read_tensor(ctypes.addressof(self), 0, raw)
        flat = raw.view(np.float32 if self.type == F32 else np.int32)
        return np.lib.stride_tricks.as_strided(flat, self.shape[::-1], tuple(self.nb)[::-1], writeable=False)


class _InitParams(ctypes.Structure):
    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


@functools.cache
def check() -> None:
    """Raise `EngineLoadError` unless the mirror fits the loaded library."""
    overhead = ggml.function("ggml_tensor_overhead", ctypes.c_size_t)()
    if overhead != ctypes.sizeof(Tensor) + _OBJECT_BYTES:
        raise _misfit(f"a tensor takes {overhead} bytes, {ctypes.sizeof(Tensor) + _OBJECT_BYTES} are expected")
    name_of = ggml.function("ggml_op_name", ctypes.c_char_p, ctypes.c_int)
    for number, name in _OPERATIONS.items():
        if name_of(number) != name:
            raise _misfit(f"operation {number} is {name_of(number)!r}, not {name!r}")
    _check_fields()


def _check_fields() -> None:
    context = ggml.function("ggml_init", ctypes.c_void_p, _InitParams)(_InitParams(1 << 16, None, False))
    if not context:
        raise EngineLoadError("ggml_init failed", "free some memory")
    try:
        new = ggml.function("ggml_new_tensor_3d", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, *[ctypes.c_int64] * 3)
        first, second = new(context, F32, 7, 5, 3), new(context, F32, 7, 2, 3)
        ggml.function("ggml_set_name", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(first, b"a mirror")
        product = ggml.function("ggml_mul_mat", ctypes.c_void_p, *[ctypes.c_void_p] * 3)(context, first, second)
        tensor, result = Tensor.at(first), Tensor.at(product)
        data = ggml.function("ggml_get_data", ctypes.c_void_p, ctypes.c_void_p)(first)
        found = (tensor.type, tensor.shape, tuple(tensor.nb), bytes(tensor.name), tensor.data)
        expected = (F32, (7, 5, 3, 1), (4, 28, 140, 420), b"a mirror", data)
        operands = (result.op, result.src[0], result.src[1], result.src[2])
        if found != expected or operands != (MUL_MAT, first, second, None):
            raise _misfit(f"a tensor reads as {found} and {operands}")
    finally:
        ggml.function("ggml_free", None, ctypes.c_void_p)(context)


def _misfit(what: str) -> EngineLoadError:
    return EngineLoadError(
        f"ggml {ggml.version()} does not fit the mirror of its tensors: {what}", "reinstall the pinned llama-cpp-python"
    )
