"""Whole files against llama.cpp's own quantizer, byte for byte."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from edgellama.errors import InvalidFileError, NotFoundError, UsageError
from edgellama.gguf_io import GGMLType, TensorSpec, Typed, ValueType, read, writing
from edgellama.quantize import Options, quantize_file
from edgellama.quantize.choice import Overrides
from edgellama.quantize.imatrix import load
from edgellama.quantize.recipes import RECIPES

pytestmark = pytest.mark.llamacpp

MODELS = {
    "dense": {"architecture": "llama", "layers": 9, "keys": {"llama.feed_forward_length": 256}},
    "grouped": {"architecture": "llama", "keys": {"llama.attention.head_count": 8, "llama.attention.head_count_kv": 2}},
    "experts": {"architecture": "llama", "layers": 3, "keys": {"llama.expert_count": 8, "llama.expert_used_count": 2}},
    "shallow": {"architecture": "llama", "layers": 2, "keys": {"llama.feed_forward_length": 256}},
    "narrow": {"architecture": "qwen2", "layers": 4, "width": 96},
    "f16": {"architecture": "gemma3", "layers": 4, "type": GGMLType.F16},
    "f32": {"architecture": "phi3", "layers": 4, "type": GGMLType.F32},
}
PLAIN = [
    name for name, r in RECIPES.items() if not name.startswith(("IQ1", "IQ2", "IQ3_XXS", "IQ3_XS", "Q2_K_S", "Q2_0"))
]


def both(
    native: Callable[..., None], source: Path, folder: Path, recipe: str, **native_flags: object
) -> tuple[bytes, Path]:
    theirs = folder / "theirs.gguf"
    chosen = RECIPES[recipe]
    native(source, theirs, chosen.file_type, only_copy=chosen.copies, **native_flags)
    return theirs.read_bytes(), folder / "ours.gguf"


def write_matrix(path: Path, model: Path, leave_out: str = "") -> Path:
    """A random importance matrix for a model; the last expert of each tensor was never seen."""
    rng = np.random.default_rng(5)
    specs, data = [], []
    for tensor in read(model).tensors:
        if len(tensor.shape) < 2 or tensor.name == leave_out:
            continue
        experts = tensor.shape[2] if len(tensor.shape) > 2 else 1
        counts = np.full(experts, 512.0, np.float32)
        counts[experts - 1] = 0 if experts > 1 else 512
        sums = (rng.random((experts, tensor.shape[0])) ** 2 * 100 + 1e-3).astype(np.float32)
        specs += [
            TensorSpec(f"{tensor.name}.in_sum2", (tensor.shape[0], experts), GGMLType.F32),
            TensorSpec(f"{tensor.name}.counts", (1, experts), GGMLType.F32),
        ]
        data += [sums, counts]
    keys = {
        "general.type": "imatrix",
        "imatrix.datasets": Typed(["a text of some length.txt"], ValueType.ARRAY, ValueType.STRING),
        "imatrix.chunk_count": 4,
        "imatrix.chunk_size": 512,
    }
    with writing(path, keys, specs) as out:
        for spec, values in zip(specs, data, strict=True):
            out.write(spec.name, values.tobytes())
    return path


@pytest.mark.parametrize("recipe", PLAIN)
def test_every_recipe_on_a_dense_model(
    native: Callable[..., None], make_model: Callable[..., Path], tmp_path: Path, recipe: str
) -> None:
    source = make_model("dense", **MODELS["dense"])
    expected, ours = both(native, source, tmp_path, recipe)
    quantize_file(source, ours, Options(recipe=recipe, threads=2))
    assert ours.read_bytes() == expected


@pytest.mark.parametrize("recipe", ["Q4_K_M", "Q3_K_M", "Q2_K", "MXFP4_MOE"])
@pytest.mark.parametrize("model", [name for name in MODELS if name not in {"dense", "shallow"}])
def test_other_models(
    native: Callable[..., None], make_model: Callable[..., Path], tmp_path: Path, model: str, recipe: str
) -> None:
    source = make_model(model, **MODELS[model])
    expected, ours = both(native, source, tmp_path, recipe)
    quantize_file(source, ours, Options(recipe=recipe, threads=2))
    assert ours.read_bytes() == expected


WEIGHED = [
    "Q4_0",
    "Q5_0",
    "Q5_1",
    "Q2_K",
    "Q2_K_S",
    "Q3_K_M",
    "Q4_K_M",
    "Q5_K_M",
    "Q6_K",
    "IQ4_XS",
    "IQ3_XS",
    "IQ2_XXS",
]


@pytest.mark.parametrize("recipe", WEIGHED)
def test_recipes_with_importance(
    native: Callable[..., None], make_model: Callable[..., Path], tmp_path: Path, recipe: str
) -> None:
    needs_all = recipe not in PLAIN
    name = "shallow" if needs_all else "dense"  # llama.cpp takes seconds for the smallest types
    source = make_model(name, **MODELS[name])
    file = write_matrix(tmp_path / "importance.gguf", source, "" if needs_all else "blk.1.attn_q.weight")
    expected, ours = both(native, source, tmp_path, recipe, matrix=load(file))
    quantize_file(source, ours, Options(recipe=recipe, imatrix=file, threads=2))
    assert ours.read_bytes() == expected


@pytest.mark.parametrize("recipe", ["Q4_K_M", "Q2_K", "IQ4_XS"])
def test_experts_have_importance_of_their_own(
    native: Callable[..., None], make_model: Callable[..., Path], tmp_path: Path, recipe: str
) -> None:
    source = make_model("experts", **MODELS["experts"])
    file = write_matrix(tmp_path / "importance.gguf", source)
    expected, ours = both(native, source, tmp_path, recipe, matrix=load(file))
    quantize_file(source, ours, Options(recipe=recipe, imatrix=file, threads=2))
    assert ours.read_bytes() == expected


FLAGS: dict[str, tuple[dict[str, object], Options]] = {
    "pure": ({"pure": True}, Options(overrides=Overrides(pure=True))),
    "leave output": ({"quantize_output_tensor": False}, Options(overrides=Overrides(leave_output=True))),
    "output type": ({"output_tensor_type": 8}, Options(overrides=Overrides(output_type=GGMLType.Q8_0))),
    "embedding type": ({"token_embedding_type": 12}, Options(overrides=Overrides(embedding_type=GGMLType.Q4_K))),
    "patterns": (
        {"patterns": [("attn_v", 14), ("blk\\.[02]\\.ffn_down", 8)]},
        Options(overrides=Overrides(patterns=(("attn_v", GGMLType.Q6_K), (r"blk\.[02]\.ffn_down", GGMLType.Q8_0)))),
    ),
    "pruned": ({"prune": [3, 4, 8]}, Options(prune_layers=(3, 4, 8))),
}


@pytest.mark.parametrize("model", ["dense", "experts"])
@pytest.mark.parametrize("flag", FLAGS)
def test_llama_quantizes_options(
    native: Callable[..., None], make_model: Callable[..., Path], tmp_path: Path, flag: str, model: str
) -> None:
    if flag == "pruned" and model == "experts":
        pytest.skip("the model with experts has too few layers to prune these")
    source = make_model(model, **MODELS[model])
    flags, options = FLAGS[flag]
    expected, ours = both(native, source, tmp_path, "Q4_K_M", **flags)
    quantize_file(source, ours, options)
    assert ours.read_bytes() == expected


def test_requantizing_must_be_allowed(
    native: Callable[..., None], make_model: Callable[..., Path], tmp_path: Path
) -> None:
    source = tmp_path / "q8.gguf"
    quantize_file(make_model("dense", **MODELS["dense"]), source, Options(recipe="Q8_0"))
    with pytest.raises(UsageError, match="is Q8_0 already"):
        quantize_file(source, tmp_path / "ours.gguf", Options(recipe="Q4_K_M"))
    expected, ours = both(native, source, tmp_path, "Q4_K_M", allow_requantize=True)
    quantize_file(source, ours, Options(recipe="Q4_K_M", allow_requantize=True))
    assert ours.read_bytes() == expected


def test_split_sources_and_split_targets(
    native: Callable[..., None], make_model: Callable[..., Path], tmp_path: Path
) -> None:
    plain = make_model("dense", **MODELS["dense"])
    quantize_file(plain, tmp_path / "parts.gguf", Options(recipe="COPY", split_max_bytes=2_000_000))
    parts = sorted(tmp_path.glob("parts-*-of-*.gguf"))
    assert len(parts) > 2
    assert read(parts[0]).parameters == read(plain).parameters
    whole, direct = tmp_path / "whole.gguf", tmp_path / "direct.gguf"
    quantize_file(parts[0], whole, Options(recipe="Q4_K_M"))
    quantize_file(plain, direct, Options(recipe="Q4_K_M"))
    assert whole.read_bytes() == direct.read_bytes()
    native(parts[0], tmp_path / "theirs", 15, keep_split=True)
    quantize_file(parts[0], tmp_path / "ours.gguf", Options(recipe="Q4_K_M", keep_split=True))
    names = [part.name.replace("parts", "") for part in parts]
    assert all((tmp_path / f"ours{n}").read_bytes() == (tmp_path / f"theirs{n}").read_bytes() for n in names)


def test_what_is_not_finite_is_named(make_model: Callable[..., Path], tmp_path: Path) -> None:
    source = tmp_path / "damaged.gguf"
    data = bytearray(make_model("f32", **MODELS["f32"]).read_bytes())
    tensor = next(t for t in read(make_model("f32", **MODELS["f32"])).tensors if t.name == "blk.2.ffn_down.weight")
    place = tensor.offset + 4 * (5 * tensor.shape[0] + 77)
    data[place : place + 4] = np.float32(np.nan).tobytes()
    source.write_bytes(data)
    target = tmp_path / "out.gguf"
    with pytest.raises(InvalidFileError, match=r"blk\.2\.ffn_down\.weight: the value in row 5, column 77 is nan"):
        quantize_file(source, target, Options(recipe="Q4_K_M"))
    assert not target.exists()


def test_overflow_of_half_precision_is_named(make_model: Callable[..., Path], tmp_path: Path) -> None:
    source = tmp_path / "huge.gguf"
    data = bytearray(make_model("f32", **MODELS["f32"]).read_bytes())
    tensor = next(t for t in read(make_model("f32", **MODELS["f32"])).tensors if t.name == "blk.1.attn_output.weight")
    data[tensor.offset : tensor.offset + 4] = np.float32(1e9).tobytes()
    source.write_bytes(data)
    with pytest.raises(InvalidFileError, match="overflows F16"):
        quantize_file(source, tmp_path / "out.gguf", Options(recipe="F16"))


def test_metadata_is_kept_and_overridden(make_model: Callable[..., Path], tmp_path: Path) -> None:
    source, target = make_model("dense", **MODELS["dense"]), tmp_path / "out.gguf"
    words = ("general.name=str:Ünïcode", "llama.context_length=int:77", "some.flag=bool:true", "some.real=float:0.5")
    quantize_file(source, target, Options(recipe="Q8_0", override_kv=words))
    before, after = read(source), read(target)
    changed = {"general.quantization_version", "general.file_type", "llama.context_length"}
    kept = {key: value for key, value in before.encoded_metadata().items() if key not in changed}
    assert all(after.encoded_metadata()[key] == value for key, value in kept.items())
    assert (after.text("general.name"), after.context_tokens) == ("Ünïcode", 77)
    assert (after.get("some.flag"), after.get("some.real"), after.get("general.file_type")) == (True, 0.5, 7)
    with pytest.raises(UsageError, match="not KEY=TYPE:VALUE"):
        quantize_file(source, target, Options(override_kv=("general.name",)))


def test_wrong_recipes_and_matrices_are_told(make_model: Callable[..., Path], tmp_path: Path) -> None:
    source, target = make_model("dense", **MODELS["dense"]), tmp_path / "out.gguf"
    with pytest.raises(UsageError, match="no recipe 'Q4KM'"):
        quantize_file(source, target, Options(recipe="Q4KM"))
    with pytest.raises(UsageError, match="needs an importance matrix"):
        quantize_file(source, target, Options(recipe="IQ2_XXS"))
    with pytest.raises(UsageError, match="same file"):
        quantize_file(source, source, Options())
    other = write_matrix(tmp_path / "other.gguf", make_model("narrow", **MODELS["narrow"]))
    with pytest.raises(InvalidFileError, match="collected from another model"):
        quantize_file(source, target, Options(imatrix=other))
    other.write_bytes(b"\x03\x00\x00\x00\xff\xff\xff\x7f")
    with pytest.raises(InvalidFileError, match="name needs"):
        quantize_file(source, target, Options(imatrix=other))


def test_a_target_that_cannot_be_written_is_told_before_any_work(
    make_model: Callable[..., Path], tmp_path: Path
) -> None:
    source = make_model("dense", **MODELS["dense"])
    with pytest.raises(UsageError, match="is a folder"):
        quantize_file(source, tmp_path, Options())
    with pytest.raises(NotFoundError, match="no such folder"):
        quantize_file(source, tmp_path / "missing" / "out.gguf", Options())
    assert not list(tmp_path.iterdir())
