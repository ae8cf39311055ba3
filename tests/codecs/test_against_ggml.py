"""Every codec against ggml's own quantize and dequantize functions, byte for byte."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray

from edgellama.codecs.base import Codec, codec, codecs
from edgellama.errors import UnsupportedError, UsageError

pytestmark = pytest.mark.llamacpp
K = 1280  # five superblocks, and a number of 32-blocks that eight lanes do not divide
TYPES = sorted((t for t, c in codecs().items() if c.kernel is not None and not c.native), key=lambda t: t.value)


@pytest.fixture(scope="module")
def ggml() -> ctypes.CDLL:
    llama_cpp = pytest.importorskip("llama_cpp")
    folder = Path(llama_cpp.__file__).parent / "lib"
    library = ctypes.CDLL(
        str(next(p for p in folder.iterdir() if "ggml-base" in p.name and p.suffix in {".so", ".dylib", ".dll"}))
    )
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    library.ggml_quantize_chunk.argtypes = [
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_void_p,
        *[ctypes.c_int64] * 3,
        ctypes.c_void_p,
    ]
    return library


def native(
    ggml: ctypes.CDLL, kind: Codec, x: NDArray[np.float32], weights: NDArray[np.float32] | None
) -> NDArray[np.uint8]:
    out = np.zeros((x.shape[0], kind.row_bytes(x.shape[1])), np.uint8)
    pointer = None if weights is None else weights.ctypes.data
    ggml.ggml_quantize_chunk(int(kind.type), x.ctypes.data, out.ctypes.data, 0, *x.shape, pointer)
    return out


def ordinary(rng: np.random.Generator) -> NDArray[np.float32]:
    return (rng.standard_t(4, (48, K)) * 0.02).astype(np.float32)


def hard(rng: np.random.Generator) -> NDArray[np.float32]:
    """Rows that break shortcuts: flat, signs, denormals, huge, ties, one-hot, mixed scales."""
    x = ordinary(rng)[:32]
    index = np.arange(K)
    with np.errstate(over="ignore", under="ignore"):
        for row, factor in enumerate((1e-38, 1e-33, 1e-28, 1e-20, 1e-10, 1e-6, 1e6, 1e25, 1e30, 1e36)):
            x[row] *= np.float32(factor)
    x[10], x[11], x[12] = 0, 1, -0.0
    x[13], x[14] = -np.abs(x[13]), np.abs(x[14])
    x[15] = np.where(index % 256 == 17, 3.0, 0)
    x[16] = 1e-42
    x[17] = np.round(x[17] * 50) / 50
    x[18] = np.where(rng.random(K) < 0.5, -0.5, 0.5)
    x[19] = rng.integers(0, 2, K) * np.float32(1e-44)
    x[20] = np.where(index % 16 == 3, 1e-3, 1e-9)
    x[21, ::32] *= np.float32(1e25)
    x[22] = np.where(index % 32 == 0, -5e-16, 5e-16)
    x[23] = np.where(index % 2 == 0, -0.0, np.abs(x[23]))
    x[24] = np.float32(2.0) ** rng.integers(-126, 100, K)
    x[25] = np.nextafter(np.float32(2.0) ** rng.integers(-20, 90, K), np.float32(0), dtype=np.float32)
    return x


def importances(rng: np.random.Generator) -> dict[str, NDArray[np.float32] | None]:
    holes = rng.random(K).astype(np.float32)
    holes[:64] = 0
    holes[300] = 0
    tiny = (rng.random(K) * 1e-30).astype(np.float32)
    return {
        "none": None,
        "ordinary": (rng.random(K) ** 2).astype(np.float32),
        "zero": np.zeros(K, np.float32),
        "holes": holes,
        "tiny": tiny,
    }


@pytest.mark.parametrize("make", [ordinary, hard])
@pytest.mark.parametrize("kind", TYPES, ids=lambda t: t.name)
def test_quantize_gives_ggmls_bytes(
    ggml: ctypes.CDLL, kind: Type, make: Callable[[np.random.Generator], NDArray[np.float32]]
) -> None:
    rng = np.random.default_rng(int(kind) + 100)
    chosen, x = codec(kind), np.ascontiguousarray(make(rng))
    for name, weights in importances(rng).items():
        ours, theirs = chosen.quantize(x, weights), native(ggml, chosen, x, weights)
        wrong = np.flatnonzero((ours != theirs).any(axis=1))
        assert not wrong.size, f"{kind.name} with {name} weights differs in rows {wrong.tolist()}"


@pytest.mark.parametrize("kind", TYPES, ids=lambda t: t.name)
def test_rows_and_slabs_do_not_influence_each_other(kind: Type) -> None:
    rng = np.random.default_rng(int(kind))
    chosen, x, weights = codec(kind), ordinary(rng), (rng.random(K)).astype(np.float32)
    whole = chosen.quantize(x, weights)
    parts = [chosen.quantize(part, weights) for part in np.array_split(x, [1, 4, 17])]
    assert np.array_equal(whole, np.concatenate(parts))


@pytest.mark.parametrize("kind", [t for t in TYPES if t not in (Type.F32, Type.F16, Type.BF16)], ids=lambda t: t.name)
def test_dequantize_gives_ggmls_values(ggml: ctypes.CDLL, kind: Type) -> None:
    chosen = codec(kind)
    data = chosen.quantize(ordinary(np.random.default_rng(7)))
    expected = np.zeros((data.shape[0], K), np.float32)
    name = kind.name.lower().replace("_k", "_K")
    getattr(ggml, f"dequantize_row_{name}")(
        ctypes.c_void_p(data.ctypes.data), ctypes.c_void_p(expected.ctypes.data), ctypes.c_int64(expected.size)
    )
    assert np.array_equal(chosen.dequantize(data), expected)


def test_wrong_shapes_and_types_are_told() -> None:
    with pytest.raises(UsageError, match="rows of 100 values"):
        codec(Type.Q4_K).quantize(np.zeros((1, 100), np.float32))
    with pytest.raises(UsageError, match="importance weights have shape"):
        codec(Type.Q4_K).quantize(np.zeros((1, 256), np.float32), np.ones(255, np.float32))
    with pytest.raises(UnsupportedError, match="I8"):
        codec(Type.I8)
