from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from edgellama.engine import probe
from edgellama.engine.base import EngineOptions, KVType, LoraAdapter
from edgellama.engine.probe import FileMark, Reference, Tolerance, compare, ladder, plainest, reference_of
from edgellama.errors import InvalidFileError

MARK = FileMark(size_bytes=10, header_sha256="ab")
STRICT = probe.tolerance(EngineOptions())


def logits(positions: int = 12, vocabulary: int = 3000, seed: int = 0) -> NDArray[np.float32]:
    """Peaked like a language model's: a few likely tokens over a wide floor."""
    draw = np.random.default_rng(seed)
    rows = draw.normal(0, 2, (positions, vocabulary))
    rows[np.arange(positions), draw.integers(0, vocabulary, positions)] += 12
    return rows.astype(np.float32)


def reference(rows: NDArray[np.float32]) -> Reference:
    return reference_of(MARK, "test", range(len(rows)), rows)


def softmax(rows: NDArray[np.float32]) -> NDArray[np.float64]:
    powers = np.exp(rows.astype(np.float64) - rows.max(axis=1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=1, keepdims=True))


# ---- rungs


def names(options: EngineOptions, layers: int = 32) -> list[str]:
    return [rung.name for rung in ladder(options, layers)]


def test_the_ladder_on_a_machine_with_a_device_has_every_rung_in_order() -> None:
    options = EngineOptions(gpu_layers=-1, kv_type_key="q8_0", kv_type_value="q8_0")
    assert names(options) == [
        "as asked",
        "weight repacking off",
        "flash attention off",
        "f16 KV cache",
        "fewer GPU layers",
        "CPU only",
        "JIT engine",
    ]


def test_rungs_that_change_nothing_are_left_out() -> None:
    options = EngineOptions(gpu_layers=0, repack_weights=False, flash_attention="off", kv_type_key="f32")
    assert names(options) == ["as asked", "JIT engine"]


def test_the_jit_engine_stands_below_llamacpp_alone() -> None:
    """Not below itself or the fake, and not where an adapter is asked for, which it would leave out."""
    options = EngineOptions(gpu_layers=4, use_mlock=True)
    *_, last = ladder(options, 8)
    assert (last.engine, last.options.gpu_layers, last.options.use_mlock) == ("jit", 0, False)
    assert {rung.engine for rung in ladder(options, 8)[:-1]} == {"llamacpp"}
    for others in (ladder(options, 8, "jit"), ladder(options, 8, "fake")):
        assert len({rung.engine for rung in others}) == 1
    adapted = EngineOptions(loras=(LoraAdapter("a.gguf"),))
    assert {rung.engine for rung in ladder(adapted, 8)} == {"llamacpp"}


def test_each_rung_keeps_what_the_ones_above_changed() -> None:
    asked = EngineOptions(kv_type_key="q4_0", kv_type_value="q4_0", threads=3)
    last = ladder(asked, 32)[-2]
    assert last.options == msgspec.structs.replace(
        asked, repack_weights=False, flash_attention="off", kv_type_key="f16", kv_type_value="f16", gpu_layers=0
    )


def test_flash_attention_goes_together_with_a_quantized_value_cache() -> None:
    options = next(r.options for r in ladder(EngineOptions(kv_type_value="q8_0"), 32) if "flash" in r.name)
    assert options.kv_type_value == "f16"


@given(st.integers(-1, 200), st.integers(0, 128))
def test_layers_on_the_device_never_grow(gpu_layers: int, layers: int) -> None:
    counts = [
        layers if rung.options.gpu_layers < 0 else rung.options.gpu_layers
        for rung in ladder(EngineOptions(gpu_layers=gpu_layers), layers)
    ]
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] == 0


def test_the_reference_runs_at_settings_that_differ_from_everything_risky() -> None:
    plain = plainest(EngineOptions(sequences=8, embeddings=True))
    assert not plain.repack_weights
    assert plain.flash_attention == "off"
    assert (plain.kv_type_key, plain.kv_type_value, plain.threads, plain.gpu_layers) == ("f32", "f32", 1, 0)


# ---- comparison


def test_the_divergence_is_that_of_the_textbook() -> None:
    """With a vocabulary small enough to be kept whole."""
    p, q = logits(vocabulary=200, seed=1), logits(vocabulary=200, seed=2)
    textbook = (softmax(p) * np.log(softmax(p) / softmax(q))).sum(axis=1)
    found = compare(q, reference(p), STRICT)
    assert found.kl_mean == pytest.approx(textbook.mean(), rel=1e-5)
    assert found.kl_max == pytest.approx(textbook.max(), rel=1e-5)


@given(st.integers(0, 2**32 - 1), st.floats(0.01, 3.0))
def test_keeping_a_part_of_the_vocabulary_never_overstates_the_divergence(seed: int, scale: float) -> None:
    p = logits(9, 2000, seed)
    q = p + np.random.default_rng(seed + 1).normal(0, scale, p.shape).astype(np.float32)
    textbook = (softmax(p) * np.log(softmax(p) / softmax(q))).sum(axis=1).mean()
    found = compare(q, reference(p), STRICT).kl_mean
    assert found is not None
    assert 0 <= found <= textbook + 1e-6


def test_a_shift_of_all_logits_changes_nothing() -> None:
    rows = logits()
    found = compare(rows + np.float32(7), reference(rows), STRICT)
    assert found.verdict == "agreed"
    assert found.kl_max == pytest.approx(0, abs=1e-5)


def test_a_flipped_near_tie_is_no_fault() -> None:
    rows = logits()
    first = rows.argmax(axis=1)
    near = rows.copy()
    for row, top in zip(near, first, strict=True):
        other = (int(top) + 1) % rows.shape[1]
        row[other] = row[top] - 0.01
    flipped = near.copy()
    for row, top in zip(flipped, first, strict=True):
        row[top] -= 0.02
    assert (near.argmax(axis=1) != flipped.argmax(axis=1)).all()
    assert compare(flipped, reference(near), STRICT).verdict == "agreed"


@pytest.mark.parametrize(
    ("noise", "verdict"), [(0.0, "agreed"), (0.05, "agreed"), (1.0, "disagreed"), (4.0, "disagreed")]
)
def test_noise_is_told_from_rounding(noise: float, verdict: str) -> None:
    rows = logits(16, 49152)
    rows[np.arange(16), rows.argmax(axis=1)] -= 5  # an undecided model feels noise, a certain one does not
    noisy = rows + np.random.default_rng(5).normal(0, noise, rows.shape).astype(np.float32)
    assert compare(noisy, reference(rows), STRICT).verdict == verdict


def test_logits_of_another_position_disagree() -> None:
    rows = logits()
    assert compare(np.roll(rows, 1, axis=0), reference(rows), STRICT).verdict == "disagreed"


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_one_number_that_is_none_is_enough(value: float) -> None:
    rows = logits()
    broken = rows.copy()
    broken[3, 17] = value
    assert compare(broken, reference(rows), STRICT).verdict == "non-finite"
    assert compare(broken, None, STRICT).verdict == "non-finite"


def test_logits_all_alike_are_not_usable() -> None:
    assert compare(np.zeros((4, 100), np.float32), None, STRICT).verdict == "non-finite"


def test_without_a_reference_only_finiteness_is_claimed() -> None:
    found = compare(logits(), None, STRICT)
    assert found.verdict == "finite-only"
    assert "no reference" in found.words


def test_coarse_caches_are_allowed_their_price_and_no_more() -> None:
    kinds: Sequence[KVType] = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
    means = [probe.tolerance(EngineOptions(kv_type_key="f32", kv_type_value=kind)).mean for kind in kinds]
    assert means == sorted(means)
    assert probe.tolerance(EngineOptions(kv_type_key="q4_0", kv_type_value="f16")) == Tolerance(0.4, 4.0)


def test_a_sensitive_model_is_allowed_a_multiple_of_its_own_noise() -> None:
    rows = logits(16, 49152)
    rows[np.arange(16), rows.argmax(axis=1)] -= 5
    draw = np.random.default_rng(5)
    plain = reference(rows)
    noise = probe.noise_of(rows + draw.normal(0, 0.7, rows.shape).astype(np.float32), plain)
    assert noise is not None
    assert 0.03 < noise.mean < 0.25
    other = rows + draw.normal(0, 0.7, rows.shape).astype(np.float32)
    assert compare(other, plain, STRICT).verdict == "disagreed"
    known = msgspec.structs.replace(plain, noise=noise)
    assert compare(other, known, probe.tolerance(EngineOptions(), noise)).verdict == "agreed"
    broken = rows + draw.normal(0, 3.0, rows.shape).astype(np.float32)
    assert compare(broken, known, probe.tolerance(EngineOptions(), noise)).verdict == "disagreed"


def test_a_model_that_is_all_noise_is_not_judged() -> None:
    rows = logits()
    chaos = msgspec.structs.replace(reference(rows), noise=probe.Noise(mean=4.0, largest=9.0))
    found = compare(logits(seed=3), chaos, STRICT)
    assert found.verdict == "finite-only"
    assert "rounding" in found.words


# ---- the reference file


def test_a_reference_comes_back_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf.check.json"
    wanted = reference(logits())
    path.write_bytes(msgspec.json.encode(wanted))
    assert probe.read_reference(path, MARK) == wanted
    assert probe.read_reference(tmp_path / "none", MARK) is None


def _damage(change: str, data: bytes) -> bytes:
    content = json.loads(data)
    first = content["positions"][0]
    match change:
        case "cut":
            return data[: len(data) // 2]
        case "empty":
            return b""
        case "newer":
            content["schema"] = 99
        case "no schema":
            del content["schema"]
        case "other file":
            content["file"]["size_bytes"] = 11
        case "foreign id":
            first["ids"] = base64.b64encode(np.full(4, 1 << 30, "<i4").tobytes()).decode()
        case "lengths":
            first["logits"] = first["logits"][:16]
        case "nan":
            ids = np.frombuffer(base64.b64decode(first["ids"]), "<i4")
            first["logits"] = base64.b64encode(np.full(len(ids), np.nan, "<f4").tobytes()).decode()
        case "base64":
            first["ids"] = "!!!"
        case "no positions":
            content["positions"] = []
        case "noise":
            content["noise"] = {"mean": "much", "largest": 1}
        case "token":
            content["tokens"][0] = 1 << 40
        case "deep":
            return b'{"schema": 1, "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    return json.dumps(content).encode()


@pytest.mark.parametrize(
    "change",
    [
        "cut",
        "empty",
        "newer",
        "no schema",
        "other file",
        "foreign id",
        "lengths",
        "nan",
        "base64",
        "no positions",
        "noise",
        "token",
        "deep",
    ],
)
def test_a_bad_reference_is_refused(tmp_path: Path, change: str) -> None:
    path = tmp_path / "x.gguf.check.json"
    path.write_bytes(_damage(change, msgspec.json.encode(reference(logits()))))
    with pytest.raises(InvalidFileError) as caught:
        probe.read_reference(path, MARK)
    assert ("newer version" in caught.value.message) == (change == "newer")
