"""What the JIT engine promises beyond the engine contract."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from edgellama.engine import jit
from edgellama.engine.base import Batch, EngineOptions, LoraAdapter
from edgellama.engine.jit.engine import JitEngine
from edgellama.errors import EdgellamaError, InvalidFileError, UnsupportedError, UsageError
from edgellama.gguf_io import specimen
from edgellama.quantize import quantize_file
from edgellama.quantize.options import Options

MakeModel = Callable[..., Path]
Make = Callable[..., JitEngine]
Rows = NDArray[np.float32]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[JitEngine] = []

    def load(path: Path, exact: bool = False, **changes: object) -> JitEngine:
        plain: dict[str, object] = {"context_tokens": 128, "threads": 1, "kv_type_key": "f32", "kv_type_value": "f32"}
        made.append(jit.load(str(path), EngineOptions(**(plain | changes)), exact=exact))  # type: ignore[arg-type]
        return made[-1]

    yield load
    for engine in made:
        engine.close()


def rows_of(engine: JitEngine, tokens: list[int], start: int = 0, sequence: int = 0) -> Rows:
    return engine.decode(Batch.one_sequence(tokens, start, sequence, "all")).copy()


TOKENS = [int(t) for t in np.random.default_rng(3).integers(3, 260, 50)]


def divergence(a: Rows, b: Rows) -> float:
    """Mean KL divergence of b's distributions from a's."""

    def logs(x: Rows) -> NDArray[np.float64]:
        wide = x.astype(np.float64)
        wide -= wide.max(1, keepdims=True)
        return wide - np.log(np.exp(wide).sum(1, keepdims=True))

    return float((np.exp(logs(a)) * (logs(a) - logs(b))).sum(1).mean())


@pytest.mark.parametrize("recipe", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K_M", "Q5_K_M", "Q6_K"])
def test_fast_agrees_with_exact_on_every_fast_type(
    make_model: MakeModel, make: Make, tmp_path: Path, recipe: str
) -> None:
    """Activations of 8 bits cost a little; float weights cost only float32's rounding."""
    source = make_model("llama", width=256, layers=2)
    quantize_file(source, tmp_path / "q.gguf", Options(recipe=recipe))
    exact, fast = (rows_of(make(tmp_path / "q.gguf", exact=e), TOKENS) for e in (True, False))
    limit = 1e-9 if recipe in ("F16", "BF16") else 0.03
    assert divergence(exact, fast) < limit
    assert divergence(exact, exact[::-1]) > 100 * limit


@pytest.mark.parametrize("recipe", ["Q2_K", "Q3_K_M", "IQ4_NL", "IQ4_XS", "TQ2_0"])
def test_other_types_are_dequantized(make_model: MakeModel, make: Make, tmp_path: Path, recipe: str) -> None:
    source = make_model("llama", width=256, layers=2)
    quantize_file(source, tmp_path / "q.gguf", Options(recipe=recipe))
    exact, fast = (rows_of(make(tmp_path / "q.gguf", exact=e), TOKENS) for e in (True, False))
    assert divergence(exact, fast) < 0.03


@pytest.mark.parametrize("threads", [2, 3, 5])
def test_threads_do_not_change_a_bit(make_model: MakeModel, make: Make, threads: int) -> None:
    path = make_model("qwen3moe")
    alone = rows_of(make(path), TOKENS)
    for _ in range(5):
        np.testing.assert_array_equal(rows_of(make(path, threads=threads), TOKENS), alone)


def test_batch_shape_does_not_change_a_bit_in_float_models(make_model: MakeModel, make: Make) -> None:
    engine = make(make_model("llama"), sequences=2)
    at_once = rows_of(engine, TOKENS)
    chunks = [rows_of(engine, TOKENS[i : i + 7], i, 1) for i in range(0, len(TOKENS), 7)]
    np.testing.assert_allclose(np.concatenate(chunks), at_once, atol=1e-4)


@pytest.mark.parametrize("exact", [True, False])
def test_shifting_a_shared_prefix_leaves_the_other_sequence_alone(
    make_model: MakeModel, make: Make, exact: bool
) -> None:
    engine = make(make_model("llama"), exact, sequences=3)
    cold = rows_of(engine, TOKENS)
    rows_of(engine, TOKENS[:30], sequence=1)
    engine.copy_sequence(1, 2, 0, 30)
    engine.shift_sequence(1, 0, -1, 40)
    assert (engine.sequence_length(1), engine.sequence_length(2)) == (70, 30)
    for sequence, start in ((2, 30), (1, 70)):
        np.testing.assert_allclose(rows_of(engine, TOKENS[30:], start, sequence), cold[30:], atol=2e-3)


def test_cells_are_used_again(make_model: MakeModel, make: Make) -> None:
    """Far more tokens than cells pass through, in changing company."""
    engine = make(make_model("llama", layers=2), sequences=3, context_tokens=64)
    cold = rows_of(engine, TOKENS)
    draw = np.random.default_rng(1)
    for _ in range(60):
        sequence, other = (int(s) for s in draw.permutation(3)[:2])
        engine.remove_sequence(other)
        n = engine.sequence_length(sequence)
        if n < len(TOKENS):
            stop = min(len(TOKENS), n + int(draw.integers(1, 20)))
            np.testing.assert_allclose(rows_of(engine, TOKENS[n:stop], n, sequence), cold[n:stop], atol=1e-3)
        if engine.sequence_length(sequence):
            engine.copy_sequence(sequence, other, 0, int(draw.integers(1, engine.sequence_length(sequence) + 1)))
        if draw.random() < 0.3:
            engine.remove_sequence(sequence, int(draw.integers(0, 30)))


def test_a_state_serves_both_modes_but_no_other_model(make_model: MakeModel, make: Make) -> None:
    path = make_model("llama", layers=2)
    fast, exact = make(path), make(path, exact=True)
    cold = rows_of(exact, TOKENS)
    rows_of(fast, TOKENS[:30])
    state = fast.save_sequence(0)
    exact.restore_sequence(0, state)
    np.testing.assert_allclose(rows_of(exact, TOKENS[30:], 30), cold[30:], atol=1e-3)
    other = make(make_model("llama", {"rope.freq_base": 20000.0}, layers=2))
    with pytest.raises(InvalidFileError):
        other.restore_sequence(0, state)
    with pytest.raises(InvalidFileError):
        make(path, context_tokens=20).restore_sequence(0, state)


def test_a_nan_in_the_weights_reaches_the_logits(make_model: MakeModel, make: Make, tmp_path: Path) -> None:
    """Whatever is not a number must be seen by the caller, in float and in quantized models."""
    for recipe in ("F32", "Q8_0"):
        source = make_model("llama", width=256, layers=2)
        path = source
        if recipe != "F32":
            path = tmp_path / f"{recipe}.gguf"
            quantize_file(source, path, Options(recipe=recipe))
        data = bytearray(path.read_bytes())
        from edgellama.gguf_io import read

        norm = read(path).tensor("blk.1.ffn_norm.weight")
        assert norm is not None
        data[norm.offset : norm.offset + 4] = np.float32(np.nan).tobytes()
        path.write_bytes(data)
        assert not np.isfinite(rows_of(make(path), TOKENS[:5])).any()


def test_an_unknown_architecture_is_refused_by_name(tmp_path: Path) -> None:
    specimen.build(tmp_path / "m.gguf", "command-r")
    with pytest.raises(UnsupportedError, match="command-r") as caught:
        jit.load(str(tmp_path / "m.gguf"), EngineOptions())
    assert "llamacpp" in caught.value.advice


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"kv_type_key": "q4_0"}, UnsupportedError),
        ({"kv_type_value": "q8_0"}, UnsupportedError),  # heads of 16
        ({"gpu_layers": 3}, UnsupportedError),
        ({"pooling": "rank"}, UnsupportedError),
        ({"use_mlock": True}, UnsupportedError),
        ({"sequences": 0}, UsageError),
        ({"context_tokens": -1}, UsageError),
        ({"threads": 100000}, UsageError),
        ({"loras": (LoraAdapter("missing.gguf"),)}, EdgellamaError),
    ],
)
def test_what_it_cannot_do_is_refused_aloud(
    make_model: MakeModel, make: Make, changes: dict[str, object], error: type[Exception]
) -> None:
    with pytest.raises(error):
        make(make_model("llama", layers=2), **changes)


def test_damaged_files_are_refused(make_model: MakeModel, tmp_path: Path) -> None:
    data = make_model("llama", layers=2).read_bytes()
    for cut in (0, 3, 100, len(data) // 2, len(data) - 1):
        (tmp_path / "cut.gguf").write_bytes(data[:cut])
        with pytest.raises(InvalidFileError):
            jit.load(str(tmp_path / "cut.gguf"), EngineOptions())


def test_importing_it_loads_no_compiler_and_no_native_engine() -> None:
    code = "import sys, edgellama.engine.jit; sys.exit('numba' in sys.modules or 'llama_cpp' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_it_runs_without_the_native_library(make_model: MakeModel) -> None:
    code = (
        "import sys; sys.modules['llama_cpp'] = None\n"
        "from edgellama.engine import factory\n"
        "from edgellama.engine.base import Batch, EngineOptions\n"
        "e = factory('jit')(sys.argv[1], EngineOptions(threads=1, context_tokens=32))\n"
        "assert e.decode(Batch.one_sequence([5, 6], 0)).shape == (1, 266)\n"
        "assert e.tokenizer.size == 266\n"
    )
    path = make_model("llama", layers=1)
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_memory_need_not_be_mapped(make_model: MakeModel, make: Make) -> None:
    path = make_model("llama", layers=2)
    np.testing.assert_array_equal(rows_of(make(path, use_mmap=False), TOKENS), rows_of(make(path), TOKENS))
