"""The GGUF format's numbers: value types, tensor types with their block sizes, and the limits edgellama sets."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

MAGIC = b"GGUF"
DEFAULT_ALIGNMENT = 32

# Limits of the format (GGUF specification, ggml.h).
MAX_DIMENSIONS = 4
MAX_TENSOR_NAME_BYTES = 63
MAX_KEY_BYTES = 65535
MAX_ELEMENTS = 2**63 - 1

# Limits of edgellama: far above every published model, low enough that a hostile header costs little.
MAX_KEYS = 65536
MAX_TENSORS = 262144
MAX_STRING_BYTES = 16 * 2**20
MAX_HEADER_BYTES = 128 * 2**20
MAX_ARRAY_ELEMENTS = 2**22
MAX_TOKENS = 2**21
MAX_ALIGNMENT = 2**20
MAX_SPLITS = 1024
INLINE_ARRAY_ELEMENTS = 1024
"""Arrays up to this length are read with the header; longer ones are `ArrayInfo` until asked for."""


class ValueType(IntEnum):
    """Types of metadata values."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


SCALAR_FORMATS: dict[int, str] = {
    ValueType.UINT8: "B",
    ValueType.INT8: "b",
    ValueType.UINT16: "H",
    ValueType.INT16: "h",
    ValueType.UINT32: "I",
    ValueType.INT32: "i",
    ValueType.FLOAT32: "f",
    ValueType.BOOL: "?",
    ValueType.UINT64: "Q",
    ValueType.INT64: "q",
    ValueType.FLOAT64: "d",
}
"""`struct` codes (little-endian) of the fixed-size value types."""

SCALAR_BYTES: dict[int, int] = {
    ValueType.UINT8: 1,
    ValueType.INT8: 1,
    ValueType.UINT16: 2,
    ValueType.INT16: 2,
    ValueType.UINT32: 4,
    ValueType.INT32: 4,
    ValueType.FLOAT32: 4,
    ValueType.BOOL: 1,
    ValueType.UINT64: 8,
    ValueType.INT64: 8,
    ValueType.FLOAT64: 8,
}


class GGMLType(IntEnum):
    """Tensor types, with ggml's numbers. Numbers of removed types stay free."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q8_1 = 9
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    Q8_K = 15
    IQ2_XXS = 16
    IQ2_XS = 17
    IQ3_XXS = 18
    IQ1_S = 19
    IQ4_NL = 20
    IQ3_S = 21
    IQ2_S = 22
    IQ4_XS = 23
    I8 = 24
    I16 = 25
    I32 = 26
    I64 = 27
    F64 = 28
    IQ1_M = 29
    BF16 = 30
    TQ1_0 = 34
    TQ2_0 = 35
    MXFP4 = 39
    NVFP4 = 40
    Q1_0 = 41
    Q2_0 = 42


BLOCKS: dict[int, tuple[int, int]] = {
    GGMLType.F32: (1, 4),
    GGMLType.F16: (1, 2),
    GGMLType.Q4_0: (32, 18),
    GGMLType.Q4_1: (32, 20),
    GGMLType.Q5_0: (32, 22),
    GGMLType.Q5_1: (32, 24),
    GGMLType.Q8_0: (32, 34),
    GGMLType.Q8_1: (32, 36),
    GGMLType.Q2_K: (256, 84),
    GGMLType.Q3_K: (256, 110),
    GGMLType.Q4_K: (256, 144),
    GGMLType.Q5_K: (256, 176),
    GGMLType.Q6_K: (256, 210),
    GGMLType.Q8_K: (256, 292),
    GGMLType.IQ2_XXS: (256, 66),
    GGMLType.IQ2_XS: (256, 74),
    GGMLType.IQ3_XXS: (256, 98),
    GGMLType.IQ1_S: (256, 50),
    GGMLType.IQ4_NL: (32, 18),
    GGMLType.IQ3_S: (256, 110),
    GGMLType.IQ2_S: (256, 82),
    GGMLType.IQ4_XS: (256, 136),
    GGMLType.I8: (1, 1),
    GGMLType.I16: (1, 2),
    GGMLType.I32: (1, 4),
    GGMLType.I64: (1, 8),
    GGMLType.F64: (1, 8),
    GGMLType.IQ1_M: (256, 56),
    GGMLType.BF16: (1, 2),
    GGMLType.TQ1_0: (256, 54),
    GGMLType.TQ2_0: (256, 66),
    GGMLType.MXFP4: (32, 17),
    GGMLType.NVFP4: (64, 36),
    GGMLType.Q1_0: (128, 18),
    GGMLType.Q2_0: (64, 18),
}
"""Elements and bytes of one block."""

REMOVED_TYPES: dict[int, tuple[str, str]] = {
    4: ("Q4_2", "Q4_0"),
    5: ("Q4_3", "Q4_1"),
    31: ("Q4_0_4_4", "Q4_0"),
    32: ("Q4_0_4_8", "Q4_0"),
    33: ("Q4_0_8_8", "Q4_0"),
    36: ("IQ4_NL_4_4", "IQ4_NL"),
    37: ("IQ4_NL_4_8", "IQ4_NL"),
    38: ("IQ4_NL_8_8", "IQ4_NL"),
}
"""Types ggml no longer reads, and the one that takes their place."""

NO_WEIGHTS = frozenset(
    {GGMLType.Q8_1, GGMLType.Q8_K, GGMLType.I8, GGMLType.I16, GGMLType.I32, GGMLType.I64, GGMLType.F64}
)
"""Types no engine can multiply with: intermediate formats and plain numbers."""


class ArrayInfo(NamedTuple):
    """A metadata array left in the file: element type, element count, where its data starts and how long it is."""

    type: ValueType
    length: int
    offset: int
    nbytes: int


class TensorInfo(NamedTuple):
    """A tensor: ggml's dimension order (the first one is contiguous), `offset` from the start of its own file."""

    name: str
    shape: tuple[int, ...]
    type: GGMLType
    offset: int
    nbytes: int
    split: int = 0
    """Index into `Header.paths` of the file that holds the data."""

    @property
    def elements(self) -> int:
        product = 1
        for size in self.shape:
            product *= size
        return product


def tensor_bytes(shape: tuple[int, ...], kind: GGMLType) -> int:
    """Bytes of a tensor's data; `ValueError` when a row is no whole number of blocks."""
    block, size = BLOCKS[kind]
    row = shape[0] if shape else 1
    if row % block:
        raise ValueError(f"rows of {row} elements are no whole number of {kind.name} blocks of {block}")
    elements = 1
    for n in shape:
        elements *= n
    return elements // block * size


def type_label(kind: ValueType, element: ValueType | None = None) -> str:
    """A value type as messages name it: `uint32`, `array of string`."""
    return f"array of {element.name.lower()}" if element is not None else kind.name.lower()
