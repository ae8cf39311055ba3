"""Models of every known architecture: whole ones pass, each missing or bent part is named."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from edgellama import gguf_io
from edgellama.errors import GGUFError
from edgellama.gguf_io import GGMLType, TensorSpec, Typed, ValueType, specimen, writing
from edgellama.gguf_io.architectures import ARCHITECTURES

U32 = ValueType.UINT32
_NATIVE = """
import ctypes, sys
import llama_cpp as lib
quiet = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda *_: None)
lib.llama_log_set(quiet, None)
lib.llama_backend_init()
for path in sys.argv[1:]:
    options = lib.llama_model_default_params()
    options.n_gpu_layers, options.use_extra_bufts = 0, False
    model = lib.llama_model_load_from_file(path.encode(), options)
    if not model:
        print("refused", flush=True)
        continue
    settings = lib.llama_context_default_params()
    settings.n_ctx, settings.n_threads, settings.n_threads_batch = 64, 1, 1
    context = lib.llama_init_from_model(model, settings)
    tokens = (ctypes.c_int32 * 4)(1, 2, 3, 4)
    print("ok" if lib.llama_decode(context, lib.llama_batch_get_one(tokens, 4)) == 0 else "no decode", flush=True)
    lib.llama_free(context)
    lib.llama_model_free(model)
"""


def _native(paths: list[Path]) -> list[str]:
    """What llama.cpp says to each file, in a process that may die of it."""
    pytest.importorskip("llama_cpp")
    command = [sys.executable, "-c", _NATIVE, *(str(path) for path in paths)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=_environment(), check=False)
    assert done.returncode == 0, f"{done.returncode} after {done.stdout.split()}: {done.stderr[-500:]}"
    return done.stdout.splitlines()


def _environment() -> dict[str, str]:
    import os

    return os.environ | {"GGML_NO_BACKTRACE": "1"}


def _rewrite(source: Path, target: Path, keys: dict[str, Any] | None = None, drop: str = "", **change: Any) -> None:
    """Copy a specimen with metadata replaced, one tensor dropped, or one tensor's shape or type changed."""
    header = gguf_io.read(source, arrays=True)
    values = {key: Typed(header.metadata[key], *header.value_types[key]) for key in header.metadata} | (keys or {})
    values = {key: value for key, value in values.items() if value is not None}
    specs = [TensorSpec(t.name, *change.get(t.name, (t.shape, t.type))) for t in header.tensors if t.name != drop]
    with writing(target, values, specs) as out:
        for spec in specs:
            out.write(spec.name, bytes(spec.nbytes))


@pytest.fixture(scope="module")
def specimens(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("specimens")
    made = {}
    for name in ARCHITECTURES:
        made[name] = folder / f"{name}.gguf"
        specimen.build(made[name], name, width=32, tensor_type=GGMLType.F16)
    return made


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_specimens_pass(specimens: dict[str, Path], architecture: str) -> None:
    header = gguf_io.read(specimens[architecture])
    gguf_io.require_model(header)
    assert header.architecture == architecture
    assert header.is_known
    assert header.notices == ()
    assert header.layers == 2
    assert header.parameters == sum(math.prod(t.shape) for t in header.tensors)


@pytest.mark.llamacpp
def test_llama_cpp_loads_and_decodes_every_specimen(specimens: dict[str, Path]) -> None:
    """The tables ask for exactly what llama.cpp's loaders ask for: nothing is missing in what they build."""
    paths = list(specimens.values())
    assert _native(paths) == ["ok"] * len(paths)


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_each_missing_tensor_is_named(specimens: dict[str, Path], tmp_path: Path, architecture: str) -> None:
    source = specimens[architecture]
    target = tmp_path / "missing.gguf"
    for tensor in gguf_io.read(source).tensors:
        if tensor.name.startswith("blk.0."):
            continue
        _rewrite(source, target, drop=tensor.name)
        with pytest.raises(GGUFError) as caught:
            gguf_io.read(target)
        assert repr(tensor.name) in caught.value.field
        assert caught.value.found == "no such tensor"


@pytest.mark.llamacpp
def test_llama_cpp_refuses_each_missing_tensor_too(specimens: dict[str, Path], tmp_path: Path) -> None:
    """No tensor the tables call required is optional for llama.cpp (except for phi3, where it then crashes)."""
    paths = []
    for name in ("llama", "qwen3moe", "gemma3", "deepseek2", "gpt-oss", "bert"):
        for tensor in gguf_io.read(specimens[name]).tensors:
            if not tensor.name.startswith("blk.0."):
                paths.append(tmp_path / f"{len(paths)}.gguf")
                _rewrite(specimens[name], paths[-1], drop=tensor.name)
    assert _native(paths) == ["refused"] * len(paths)


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3", "gpt-oss"])
def test_wrong_shapes_and_types(specimens: dict[str, Path], tmp_path: Path, architecture: str) -> None:
    source = specimens[architecture]
    target = tmp_path / "bent.gguf"
    for tensor in gguf_io.read(source).tensors:
        wider = (tensor.shape[0] + 32, *tensor.shape[1:])
        cases = [((wider, tensor.type), "shape"), (((*tensor.shape, 2), tensor.type), "shape")]
        cases.append(((tensor.shape, GGMLType.I8 if tensor.type is GGMLType.F16 else GGMLType.F16), "type"))
        for change, word in cases:
            _rewrite(source, target, **{tensor.name: change})
            with pytest.raises(GGUFError) as caught:
                gguf_io.read(target)
            assert repr(tensor.name) in caught.value.field
            assert caught.value.found.startswith(word)


@pytest.mark.llamacpp
def test_optional_tensors_are_llama_cpps_too(tmp_path: Path) -> None:
    paths = [tmp_path / f"{name}.gguf" for name in ("llama", "qwen2", "qwen3", "bert", "phi3")]
    for path in paths:
        specimen.build(path, path.stem, width=32, tensor_type=GGMLType.F16, optional=True)
        gguf_io.require_model(gguf_io.read(path))
    assert _native(paths) == ["ok"] * len(paths)


@pytest.mark.parametrize(("architecture", "name"), [("bert", "token_types.weight"), ("llama", "rope_freqs.weight")])
def test_optional_tensors_that_are_added_must_be_f32(tmp_path: Path, architecture: str, name: str) -> None:
    """llama.cpp aborts on other types of these, at the first token."""
    path = tmp_path / "optional.gguf"
    specimen.build(path, architecture, width=32, optional=True)
    target = tmp_path / "half.gguf"
    tensor = gguf_io.read(path).tensor(name)
    assert tensor is not None
    _rewrite(path, target, **{name: (tensor.shape, GGMLType.F16)})
    with pytest.raises(GGUFError) as caught:
        gguf_io.read(target)
    assert (caught.value.field, caught.value.expected) == (f"tensor {name!r}", "F32")


def test_fused_projections_and_optional_tensors_pass(specimens: dict[str, Path], tmp_path: Path) -> None:
    header = gguf_io.read(specimens["llama"])
    specs = [TensorSpec(t.name, t.shape, t.type) for t in header.tensors if ".attn_q." not in t.name]
    specs = [t for t in specs if ".attn_k." not in t.name and ".attn_v." not in t.name]
    specs += [TensorSpec(f"blk.{i}.attn_qkv.weight", (32, 32 + 2 * 16), GGMLType.Q8_0) for i in range(2)]
    specs += [
        TensorSpec("output.weight", (32, 266), GGMLType.Q4_0),
        TensorSpec("rope_freqs.weight", (4,), GGMLType.F32),
    ]
    target = tmp_path / "fused.gguf"
    with writing(target, specimen.metadata("llama", width=32), specs) as out:
        for spec in specs:
            out.write(spec.name, bytes(spec.nbytes))
    gguf_io.read(target)


@pytest.mark.parametrize("key", ["block_count", "context_length", "embedding_length", "attention.head_count"])
@pytest.mark.parametrize("architecture", ["llama", "bert", "deepseek2"])
def test_missing_keys(specimens: dict[str, Path], tmp_path: Path, architecture: str, key: str) -> None:
    target = tmp_path / "keys.gguf"
    _rewrite(specimens[architecture], target, {f"{architecture}.{key}": None})
    with pytest.raises(GGUFError) as caught:
        gguf_io.read(target)
    assert (caught.value.field, caught.value.found) == (f"{architecture}.{key}", "no such key")


def _per_layer(*values: int) -> Typed:
    return Typed(list(values), ValueType.ARRAY, ValueType.INT32)


_BENT: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"block_count": 0}, "block_count"),
    ("llama", {"block_count": 513}, "block_count"),
    ("llama", {"block_count": Typed(2, ValueType.UINT64)}, "block_count"),
    ("llama", {"block_count": 3}, "blk.2.attn_norm.weight"),
    ("llama", {"block_count": 1, "nextn_predict_layers": 1}, "nextn_predict_layers"),
    ("llama", {"embedding_length": 0}, "embedding_length"),
    ("llama", {"embedding_length": 2**32 - 1}, "embedding_length"),
    ("llama", {"context_length": 0}, "context_length"),
    ("llama", {"context_length": 2**31}, "context_length"),
    ("llama", {"context_length": Typed(8, ValueType.INT32)}, "context_length"),
    ("llama", {"attention.head_count": 0}, "attention.head_count"),
    ("llama", {"attention.head_count": 2**31}, "attention.head_count"),
    ("llama", {"attention.head_count": 33}, "attention.head_count"),
    ("llama", {"attention.head_count": _per_layer(4, 2)}, "attention.head_count"),
    ("llama", {"attention.head_count": _per_layer(4)}, "attention.head_count"),
    ("llama", {"attention.head_count": _per_layer(4, -4)}, "attention.head_count"),
    ("llama", {"attention.head_count": [0.5, 0.5]}, "attention.head_count"),
    ("llama", {"attention.head_count_kv": 0}, "attention.head_count_kv"),
    ("llama", {"attention.head_count_kv": 3}, "attention.head_count_kv"),
    ("llama", {"attention.head_count_kv": _per_layer(2, 4)}, "attention.head_count_kv"),
    ("llama", {"attention.key_length": 16}, "attention.value_length"),
    ("llama", {"attention.key_length": 9, "attention.value_length": 9}, "rope.dimension_count"),
    ("llama", {"attention.key_length_swa": 16}, "attention.key_length_swa"),
    ("llama", {"rope.dimension_count": 4}, "rope.dimension_count"),
    ("llama", {"rope.dimension_count": 0}, "rope.dimension_count"),
    ("gemma3", {"rope.dimension_count": 7}, "rope.dimension_count"),
    ("gemma3", {"rope.dimension_count": 10}, "rope.dimension_count"),
    ("glm4", {"rope.dimension_sections": _per_layer(2, 32, 1, 1)}, "rope.dimension_sections"),
    ("glm4", {"rope.dimension_sections": _per_layer(1, 1)}, "rope.dimension_sections"),
    ("llama", {"attention.layer_norm_rms_epsilon": -1e-5}, "layer_norm_rms_epsilon"),
    ("llama", {"attention.layer_norm_rms_epsilon": float("nan")}, "layer_norm_rms_epsilon"),
    ("llama", {"attention.layer_norm_rms_epsilon": Typed(1e-5, ValueType.FLOAT64)}, "layer_norm_rms_epsilon"),
    ("llama", {"rope.freq_base": 0.0}, "rope.freq_base"),
    ("llama", {"rope.freq_base": float("inf")}, "rope.freq_base"),
    ("llama", {"rope.scaling.type": "su"}, "rope.scaling.type"),
    ("llama", {"rope.scaling.type": 1}, "rope.scaling.type"),
    ("llama", {"expert_count": 1025}, "expert_count"),
    ("llama", {"expert_count": 4}, "expert_used_count"),
    ("llama", {"expert_used_count": 1}, "expert_used_count"),
    ("llama", {"expert_group_count": 1}, "expert_group_count"),
    ("qwen3moe", {"expert_count": 0, "expert_used_count": 0}, "expert_count"),
    ("qwen3moe", {"expert_used_count": 5}, "expert_used_count"),
    ("qwen3moe", {"expert_used_count": _per_layer(2, 9)}, "expert_used_count"),
    ("qwen3moe", {"expert_group_count": 3}, "expert_group_count"),
    ("qwen3moe", {"expert_group_count": 2}, "expert_group_used_count"),
    ("qwen2", {"attention.key_length": 16, "attention.value_length": 16}, "attention.head_count"),
    ("olmoe", {"attention.head_count_kv": 2}, "attention.head_count_kv"),
    ("deepseek2", {"attention.key_length_mla": None}, "value_length_mla"),
    ("deepseek2", {"rope.dimension_count": 16}, "rope.dimension_count"),
    ("deepseek2", {"attention.head_count_kv": 2}, "attention.key_length"),
    ("deepseek2", {"attention.temperature_scale": 0.1}, "attention.temperature_length"),
    ("gemma3n", {"attention.sliding_window_pattern": 1}, "sliding_window_pattern"),
    ("gpt-oss", {"attention.sliding_window_pattern": _per_layer(0, 0)}, "sliding_window_pattern"),
    ("gemma-embedding", {"attention.sliding_window_pattern": 6}, "sliding_window_pattern"),
    ("granite", {"logit_scale": None}, "logit_scale"),
    ("llama", {"attention.temperature_scale": float("nan")}, "temperature_scale"),
]


@pytest.mark.parametrize(("architecture", "keys", "field"), _BENT)
def test_bent_numbers(
    specimens: dict[str, Path], tmp_path: Path, architecture: str, keys: dict[str, Any], field: str
) -> None:
    """Each of these stops llama.cpp by an assertion, an exception or a signal, or could only come from a bad writer."""
    target = tmp_path / "bent.gguf"
    _rewrite(specimens[architecture], target, {f"{architecture}.{key}": value for key, value in keys.items()})
    with pytest.raises(GGUFError) as caught:
        gguf_io.read(target)
    assert field in caught.value.field
    assert caught.value.found
    assert caught.value.expected


def test_unknown_architectures_get_the_general_checks_and_a_notice(specimens: dict[str, Path], tmp_path: Path) -> None:
    def rename(**changes: Any) -> Path:
        source, target = specimens["llama"], tmp_path / "unknown.gguf"
        header = gguf_io.read(source, arrays=True)
        values = {}
        for key, value in header.metadata.items():
            values[key.replace("llama.", "marsupial.")] = Typed(value, *header.value_types[key])
        values["general.architecture"] = Typed("marsupial", ValueType.STRING)
        values |= {key.replace("__", "."): value for key, value in changes.items()}
        specs = [TensorSpec(t.name, t.shape, t.type) for t in header.tensors]
        with writing(target, values, specs) as out:
            for spec in specs:
                out.write(spec.name, bytes(spec.nbytes))
        return target

    header = gguf_io.read(rename())
    assert not header.is_known
    assert "marsupial" in header.notices[0]
    for changes, field in (
        ({"marsupial__block_count": 1}, "tensor 'blk.1."),
        ({"marsupial__context_length": 0}, "marsupial.context_length"),
        ({"tokenizer__ggml__tokens": ["a"]}, "tokenizer"),
        ({"marsupial__some_factor": float("nan")}, "marsupial.some_factor"),
        ({"general__architecture": Typed("", ValueType.STRING)}, "general.architecture"),
    ):
        with pytest.raises(GGUFError) as caught:
            gguf_io.read(rename(**changes))
        assert field in caught.value.field


def test_unaligned_data_is_refused(specimens: dict[str, Path], tmp_path: Path) -> None:
    """llama.cpp aborts when it maps a file whose tensors are not on 32-byte boundaries."""
    header = gguf_io.read(specimens["llama"])
    specs = [TensorSpec(t.name, t.shape, t.type) for t in header.tensors]
    refused = 0
    for padding in range(4):
        keys = specimen.metadata("llama", width=32) | {"general.name": "x" * (8 * padding)}
        target = tmp_path / f"{padding}.gguf"
        with writing(target, keys, specs, alignment=8) as out:
            for spec in specs:
                out.write(spec.name, bytes(spec.nbytes))
        try:
            assert gguf_io.read(target).data_offset % 32 == 0
        except GGUFError as error:
            refused += error.field == "general.alignment"
    assert refused == 3


def test_kinds(tmp_path: Path) -> None:
    cases: list[tuple[dict[str, object], list[str], str]] = [
        ({"general.type": "adapter", "general.architecture": "llama"}, ["blk.0.attn_q.weight.lora_a"], "adapter"),
        ({"general.type": "mmproj", "general.architecture": "clip"}, ["v.patch_embd.weight"], "projector"),
        ({"general.architecture": "clip"}, ["v.patch_embd.weight"], "projector"),
        ({"general.type": "imatrix"}, ["blk.0.attn_q.weight.in_sum2"], "imatrix"),
        ({"general.architecture": "llama"} | specimen.vocabulary("gpt2"), [], "vocabulary"),
    ]
    for keys, names, kind in cases:
        target = tmp_path / "kind.gguf"
        specs = [TensorSpec(name, (8,), GGMLType.F32) for name in names]
        with writing(target, keys, specs) as out:
            for spec in specs:
                out.write(spec.name, bytes(spec.nbytes))
        header = gguf_io.read(target)
        assert header.kind == kind
        with pytest.raises(GGUFError, match="expected a model"):
            gguf_io.require_model(header)


@pytest.mark.model
def test_the_default_model(default_model_path: Path) -> None:
    header = gguf_io.read(default_model_path)
    assert (header.architecture, header.layers, header.context_tokens) == ("llama", 30, 8192)
    assert header.vocabulary_tokens == 49152
    assert header.parameters == 134_515_008
    assert set(header.head_counts) == {9}
    assert set(header.head_counts_kv) == {3}
    assert "im_start" in header.chat_templates["default"]
    assert header.notices == ()
