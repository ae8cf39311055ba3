"""F16 and BF16, and F32 as it is."""

from __future__ import annotations

from typing import Any

import numpy as np
from gguf import GGMLQuantizationType

from edgellama.codecs.base import Codec, register
from edgellama.codecs.compiling import kernel
from edgellama.codecs.rounding import bits_of, to_half


@kernel
def _to_f16(x: Any, importance: Any, y: Any) -> Any:
    """float32[rows, k] -> uint8[rows, 2 k], IEEE 754 binary16."""
    for r in range(x.shape[0]):
        out = y[r].view(np.uint16)
        for i in range(x.shape[1]):
            out[i] = to_half(x[r, i])


@kernel
def _to_bf16(x: Any, importance: Any, y: Any) -> Any:
    """float32[rows, k] -> uint8[rows, 2 k], round to nearest even; NaN becomes quiet."""
    for r in range(x.shape[0]):
        out = y[r].view(np.uint16)
        for i in range(x.shape[1]):
            bits = np.uint32(bits_of(x[r, i]))
            rounded = np.uint32(bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
            nan = np.uint32(bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
            out[i] = np.uint16((bits >> np.uint32(16)) | np.uint32(64)) if nan else np.uint16(rounded)


def _to_f32(x: Any, importance: Any, y: Any) -> None:
    del importance
    y[:] = x.view(np.uint8)


register(Codec(GGMLQuantizationType.F32, _to_f32, by_row=True))
register(Codec(GGMLQuantizationType.F16, _to_f16, by_row=True))
register(Codec(GGMLQuantizationType.BF16, _to_bf16, by_row=True))
