"""The safety ladder's rules: which settings to try, what to decode, and when two sets of logits agree.

Numbers of one model differ between machines, thread counts, batch shapes, attention kernels and cache types, and a
near-tie may then flip the top token; that is no fault. A broken kernel changes the distributions themselves. So
agreement is judged by Kullback-Leibler divergence from reference logits, never by tokens.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from edgellama.engine.base import EngineOptions
from edgellama.errors import InvalidFileError

PROBE_TEXT = (
    "The quick brown fox jumps over 13 lazy dogs. Der Fuß des Bären, l'été déjà passé, ¿qué hora es? "
    "Москва — столица. 北京是中国的首都。東京は夜です。서울의 봄. السلام عليكم. नमस्ते दुनिया. "
    'def f(x): return x**2 + 3.14159 # {"key": [1, 2]}\n'
)
"""Several scripts, digits and code, so that many rows of the embedding and many attention patterns take part."""

PROBE_TOKENS = 48
"""Tokens decoded: more than one tile of every matrix kernel in use (32 rows for AMX and CUDA)."""
LEAST_TOKENS = 8
"""With fewer reference positions agreement means little, and the verdict is `finite-only`."""
KEPT_IDS = 256
"""Vocabulary entries kept per position: half are the likeliest, half a sample of the rest."""

SCHEMA = 1
SIDECAR_SUFFIX = ".check.json"
_MAX_SIDECAR_BYTES = 32 << 20

Verdict = Literal["agreed", "finite-only", "disagreed", "non-finite"]


# ---- rungs

JIT_RUNG = "JIT engine"


@dataclass(frozen=True, slots=True)
class Rung:
    """One step of the ladder: options changed from what was asked, all earlier rungs' included."""

    name: str
    options: EngineOptions
    engine: str
    """`llamacpp`, `jit` or `fake`."""


def ladder(asked: EngineOptions, layers: int, engine: str = "llamacpp") -> tuple[Rung, ...]:
    """The rungs for a model of `layers` layers, fastest first; rungs that would change nothing are left out.

    Below llama.cpp's plainest settings stands the engine that needs no native library.
    """
    options = asked
    rungs = [Rung("as asked", asked, engine)]
    for name, change in _STEPS:
        changed = msgspec.structs.replace(options, **change(options, layers))
        if changed != options:
            options = changed
            rungs.append(Rung(name, options, engine))
    if engine == "llamacpp" and not options.loras:
        rungs.append(Rung(JIT_RUNG, msgspec.structs.replace(options, gpu_layers=0, use_mlock=False), "jit"))
    return tuple(rungs)


def plainest(asked: EngineOptions) -> EngineOptions:
    """Settings whose numbers are the reference: nothing repacked, fused, shortened or shared."""
    return msgspec.structs.replace(
        asked,
        context_tokens=256,
        sequences=1,
        batch_tokens=256,
        micro_batch_tokens=256,
        threads=1,
        prefill_threads=1,
        gpu_layers=0,
        kv_type_key="f32",
        kv_type_value="f32",
        flash_attention="off",
        repack_weights=False,
        use_mmap=False,
        use_mlock=False,
        embeddings=False,
        loras=(),
    )


def _no_repack(_options: EngineOptions, _layers: int) -> dict[str, Any]:
    return {"repack_weights": False}


def _no_flash(options: EngineOptions, _layers: int) -> dict[str, Any]:
    # llama.cpp cannot make a context with a quantized value cache and no flash attention.
    value = options.kv_type_value if options.kv_type_value in _FLOAT_TYPES else "f16"
    return {"flash_attention": "off", "kv_type_value": value}


def _f16_cache(options: EngineOptions, _layers: int) -> dict[str, Any]:
    plain = {name: getattr(options, name) for name in ("kv_type_key", "kv_type_value")}
    return {name: kind if kind == "f32" else "f16" for name, kind in plain.items()}


def _fewer_layers(options: EngineOptions, layers: int) -> dict[str, Any]:
    now = layers if options.gpu_layers < 0 else min(options.gpu_layers, layers)
    return {"gpu_layers": now // 2 if now > 1 else options.gpu_layers}


def _cpu(_options: EngineOptions, _layers: int) -> dict[str, Any]:
    return {"gpu_layers": 0}


_FLOAT_TYPES = frozenset({"f32", "f16", "bf16"})
_STEPS = (
    ("weight repacking off", _no_repack),
    ("flash attention off", _no_flash),
    ("f16 KV cache", _f16_cache),
    ("fewer GPU layers", _fewer_layers),
    ("CPU only", _cpu),
)


# ---- reference logits


class Position(msgspec.Struct, frozen=True, kw_only=True):
    """Logits after one token: `ids` (int32) and their `logits` (float32), both base64 little-endian, and the
    natural logarithm of the sum of exponentials over the whole vocabulary."""

    ids: str
    logits: str
    log_sum: float


class Noise(msgspec.Struct, frozen=True, kw_only=True):
    """KL divergence, in nats, between the reference and the same settings with an F16 cache."""

    mean: float
    largest: float


class FileMark(msgspec.Struct, frozen=True, kw_only=True):
    """What a reference was computed from, in terms that survive copying the file."""

    size_bytes: int
    header_sha256: str


class Reference(msgspec.Struct, frozen=True, kw_only=True):
    """Reference logits of one model file: the sidecar `FILE.gguf.check.json`, and the copy in the cache."""

    schema: int = SCHEMA
    file: FileMark
    engine: str
    """What computed it, in words."""
    tokens: tuple[int, ...]
    vocabulary_tokens: int
    positions: tuple[Position, ...]
    """Of the last tokens, in order."""
    noise: Noise | None = None
    """How much mere rounding moves these logits; None when it was not measured."""


def reference_of(mark: FileMark, engine: str, tokens: Sequence[int], logits: NDArray[np.float32]) -> Reference:
    """Keep what a comparison needs of float32[n, vocabulary] logits of the last n tokens."""
    vocabulary = int(logits.shape[1])
    positions = []
    for row in logits:
        ids = _kept_ids(row)
        positions.append(
            Position(
                ids=_pack(ids.astype("<i4")),
                logits=_pack(row[ids].astype("<f4")),
                log_sum=float(_log_sum(row.astype(np.float64))),
            )
        )
    return Reference(
        file=mark, engine=engine, tokens=tuple(tokens), vocabulary_tokens=vocabulary, positions=tuple(positions)
    )


def _kept_ids(row: NDArray[np.float32]) -> NDArray[np.intp]:
    n = row.shape[0]
    if n <= KEPT_IDS:
        return np.arange(n)
    top = np.argpartition(row, n - KEPT_IDS // 2)[n - KEPT_IDS // 2 :]
    sample = np.arange(0, n, max(1, n // (KEPT_IDS // 2)))
    return np.union1d(top, sample)


def read_reference(path: Path, mark: FileMark) -> Reference | None:
    """The reference in `path` if it is of this file. None when there is none.

    Raises `InvalidFileError` when the file is damaged, newer than this version, or of another model file.
    """
    try:
        with path.open("rb") as stream:
            data = stream.read(_MAX_SIDECAR_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InvalidFileError(f"{path}: {error.strerror or error}") from error
    if len(data) > _MAX_SIDECAR_BYTES:
        raise InvalidFileError(f"{path}: larger than {_MAX_SIDECAR_BYTES:,} bytes")
    check_schema(path, data, SCHEMA)
    try:
        reference = msgspec.json.decode(data, type=Reference)
        for position in reference.positions:
            _unpack(position, reference.vocabulary_tokens)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise InvalidFileError(f"{path}: not reference logits: {error}") from error
    if reference.file != mark:
        raise InvalidFileError(f"{path}: belongs to another version of the model file")
    if not 0 < len(reference.positions) <= len(reference.tokens):
        raise InvalidFileError(f"{path}: {len(reference.positions)} positions for {len(reference.tokens)} tokens")
    if not all(0 <= token < reference.vocabulary_tokens for token in reference.tokens):
        raise InvalidFileError(f"{path}: a token is outside the vocabulary")
    return reference


def check_schema(path: Path, data: bytes, known: int) -> None:
    """Refuse a file whose `schema` is newer than `known`, whatever else it holds."""
    try:
        schema = msgspec.json.decode(data, type=_Schema).schema
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise InvalidFileError(f"{path}: not readable: {error}") from error
    if schema > known:
        raise InvalidFileError(
            f"{path}: written by a newer version of edgellama (schema {schema}, this version knows {known})"
        )


class _Schema(msgspec.Struct):
    schema: int


def _pack(array: NDArray[Any]) -> str:
    return base64.b64encode(array.tobytes()).decode("ascii")


def _unpack(position: Position, vocabulary: int) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
    ids = np.frombuffer(base64.b64decode(position.ids, validate=True), "<i4")
    logits = np.frombuffer(base64.b64decode(position.logits, validate=True), "<f4").astype(np.float64)
    if len(ids) != len(logits) or not len(ids):
        raise ValueError(f"{len(ids)} ids and {len(logits)} logits")
    if ids.min() < 0 or ids.max() >= vocabulary or len(np.unique(ids)) != len(ids):
        raise ValueError(f"ids are not distinct numbers below {vocabulary}")
    if not (np.isfinite(logits).all() and np.isfinite(position.log_sum)):
        raise ValueError("logits are not finite")
    return ids, logits


# ---- comparison


@dataclass(frozen=True, slots=True)
class Comparison:
    """How far logits are from the reference, in nats."""

    verdict: Verdict
    kl_mean: float | None = None
    kl_max: float | None = None
    positions: int = 0
    noise: float | None = None
    """The model's own, when that is too large to compare anything."""

    @property
    def words(self) -> str:
        """For people."""
        if self.verdict == "non-finite":
            return "the numbers are not finite"
        if self.noise is not None:
            return (
                f"the numbers are finite; mere rounding moves this model by {self.noise:.2g} nats, too much to compare"
            )
        if self.kl_mean is None or self.kl_max is None:
            return "the numbers are finite; there was no reference to compare them with"
        relation = "agree with" if self.verdict == "agreed" else "differ from"
        return (
            f"the numbers {relation} the reference: mean KL divergence {self.kl_mean:.2g}, "
            f"largest {self.kl_max:.2g} nats at {self.positions} positions"
        )


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Largest KL divergence from the reference, in nats, that counts as rounding."""

    mean: float
    largest: float


# Measured on SmolLM2-135M Q4_1 at 147 positions against F32 cache, no flash attention, one thread. Other threads, batch
# shapes and repacking: mean up to 0.002, largest 0.013. F16, BF16 and Q8_0 caches, with or without flash attention:
# 0.008 and 0.051; Q5_1: 0.025 and 0.14; Q4_0 and Q4_1: 0.12 and 1.3. Faults: one matrix row of every layer zero: 0.20
# and 0.94; one head of every layer: 0.69 and 3.9; normal noise of 0.5 on logits: 0.09 and 0.46. A single head of a
# single layer (0.006 to 0.26) can hide behind the rounding of an F16 cache.
_FINE = Tolerance(0.03, 0.3)
_TOLERANCES = {
    "f32": _FINE,
    "f16": _FINE,
    "bf16": _FINE,
    "q8_0": _FINE,
    "q5_1": Tolerance(0.1, 0.8),
    "q5_0": Tolerance(0.1, 0.8),
    "q4_1": Tolerance(0.4, 4.0),
    "q4_0": Tolerance(0.4, 4.0),
    "iq4_nl": Tolerance(0.4, 4.0),
}

# Coarser weights make a model more sensitive: the same change of cache moves F16 weights by 0.000004, Q4_1 by 0.005,
# Q4_K by 0.008, ternary ones made without training by 4 nats. Correct kernels stayed within 1.4 times of it.
_NOISE_MARGIN = 4.0
_NOISE_LIMIT = 0.25


def tolerance(options: EngineOptions, noise: Noise | None = None) -> Tolerance:
    """What the cache types in use and the model's own sensitivity allow.

    A coarse cache costs quality by choice, which is no fault.
    """
    base = max((_TOLERANCES[options.kv_type_key], _TOLERANCES[options.kv_type_value]), key=lambda t: t.mean)
    if noise is None:
        return base
    mean = _NOISE_MARGIN * noise.mean * base.mean / _FINE.mean
    largest = _NOISE_MARGIN * noise.largest * base.largest / _FINE.largest
    return Tolerance(max(base.mean, mean), max(base.largest, largest))


def noise_of(logits: NDArray[np.float32], reference: Reference) -> Noise | None:
    """The noise that these logits, of the reference's settings with an F16 cache, show; None if they are unusable."""
    found = compare(logits, reference, _FINE)
    if found.kl_mean is None or found.kl_max is None:
        return None
    return Noise(mean=found.kl_mean, largest=found.kl_max)


def finite(logits: NDArray[np.float32]) -> bool:
    """Whether logits are usable at all: finite and not all alike."""
    return bool(np.isfinite(logits).all()) and bool((np.ptp(logits, axis=1) > 0).all())


def compare(logits: NDArray[np.float32], reference: Reference | None, allowed: Tolerance) -> Comparison:
    """Judge float32[n, vocabulary] logits of the last n probe tokens."""
    if not finite(logits):
        return Comparison("non-finite")
    if reference is None or reference.vocabulary_tokens != logits.shape[1]:
        return Comparison("finite-only")
    if reference.noise is not None and not reference.noise.mean <= _NOISE_LIMIT:
        return Comparison("finite-only", noise=reference.noise.mean)
    n = min(len(reference.positions), logits.shape[0])
    if n < min(LEAST_TOKENS, len(reference.tokens)):
        return Comparison("finite-only")
    divergences = [
        _divergence(row, position, reference.vocabulary_tokens)
        for row, position in zip(logits[-n:], reference.positions[-n:], strict=True)
    ]
    mean, largest = float(np.mean(divergences)), float(np.max(divergences))
    agreed = mean <= allowed.mean and largest <= allowed.largest
    return Comparison("agreed" if agreed else "disagreed", mean, largest, n)


def _divergence(row: NDArray[np.float32], position: Position, vocabulary: int) -> float:
    """KL(reference || row) over the kept ids and one bin for all others: a lower bound of the whole sum."""
    ids, logits = _unpack(position, vocabulary)
    wide = row.astype(np.float64)
    log_p, log_q = logits - position.log_sum, wide[ids] - _log_sum(wide)
    p, q = np.exp(log_p), np.exp(log_q)
    rest_p, rest_q = max(1.0 - p.sum(), 0.0), max(1.0 - q.sum(), 1e-12)
    kept = float(np.sum(p * (log_p - log_q)))
    return max(0.0, kept + (rest_p * float(np.log(rest_p / rest_q)) if rest_p > 1e-9 else 0.0))


def _log_sum(row: NDArray[np.float64]) -> float:
    largest = row.max()
    return float(largest + np.log(np.exp(row - largest).sum()))


# ---- names of files


def digest(*parts: str | Mapping[str, Any] | EngineOptions | Sequence[int]) -> str:
    """A short name for a cache entry, from everything it depends on."""
    encoder = msgspec.json.Encoder(order="sorted")
    return hashlib.sha256(b"\0".join(encoder.encode(part) for part in parts)).hexdigest()[:32]
