"""Fixtures every room may use: the default model, and a tiny random Llama that needs no download."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from edgellama import paths

Change = Callable[[str, NDArray[np.float32]], NDArray[np.float32]]
WriteTinyLlama = Callable[..., Path]

_DEFAULT_MODEL = "SmolLM2-135M-Instruct*.gguf"
LONG_PIECE = "▁" + "long" * 24
_WORDS = ["▁", "▁the", "▁cat", "he", "llo", "▁hello", "▁w", "or", "ld", "é", "▁日本", LONG_PIECE]
_CONTROLS = ["<|im_start|>", "<|im_end|>"]


_NAMED_MODEL = os.environ.get("EDGELLAMA_TEST_MODEL")
_MODELS = paths.models_dir()
"""Where models are before any test moves the folders."""


@pytest.fixture(scope="session")
def default_model_path() -> Path:
    """The model that proves a machine: from EDGELLAMA_TEST_MODEL, else from the store. Skips aloud without one."""
    named = _NAMED_MODEL
    if named:
        assert Path(named).is_file(), f"EDGELLAMA_TEST_MODEL={named}: no such file"
        return Path(named)
    found = sorted(_MODELS.rglob(_DEFAULT_MODEL))
    if not found:
        pytest.skip(f"no {_DEFAULT_MODEL} in {_MODELS}: run scripts/test, or set EDGELLAMA_TEST_MODEL")
    return found[0]


@pytest.fixture(scope="session")
def write_tiny_llama() -> WriteTinyLlama:
    """`write(path, seed=0, change=None)` writes a random Llama: 2 layers, 2 heads of 64, one KV head, 273 tokens.

    `change(name, weights) -> weights` may alter each tensor, float32[rows, columns]; `long_rope_above` adds LongRoPE.
    """
    return _write_tiny_llama


@pytest.fixture(scope="session")
def tiny_llama_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama as a GGUF file of about a megabyte."""
    return _write_tiny_llama(tmp_path_factory.mktemp("models") / "tiny llama é.gguf")


def _write_tiny_llama(path: Path, seed: int = 0, change: Change | None = None, long_rope_above: int = 0) -> Path:
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny random llama")
    writer.add_context_length(16384)
    writer.add_embedding_length(128)
    writer.add_block_count(2)
    writer.add_feed_forward_length(256)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(64)
    writer.add_rope_freq_base(10000.0)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    if long_rope_above:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)
        writer.add_rope_scaling_orig_ctx_len(long_rope_above)
        for name, factor in (("long", 4), ("short", 1)):
            writer.add_tensor(f"rope_factors_{name}.weight", np.full(32, factor, np.float32))
    _add_vocabulary(writer, gguf)
    for name, weights in _weights(seed, 3 + 256 + len(_CONTROLS) + len(_WORDS)):
        writer.add_tensor(name, change(name, weights) if change else weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_vocabulary(writer: object, gguf: object) -> None:
    kinds = gguf.TokenType  # type: ignore[attr-defined]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *_CONTROLS, *_WORDS]
    types = [kinds.UNKNOWN, kinds.CONTROL, kinds.CONTROL] + [kinds.BYTE] * 256
    types += [kinds.CONTROL] * len(_CONTROLS) + [kinds.NORMAL] * len(_WORDS)
    writer.add_tokenizer_model("llama")  # type: ignore[attr-defined]
    writer.add_token_list(tokens)  # type: ignore[attr-defined]
    writer.add_token_scores([0.0] * (259 + len(_CONTROLS)) + [float(-i) for i in range(len(_WORDS))])  # type: ignore[attr-defined]
    writer.add_token_types(types)  # type: ignore[attr-defined]
    for role, token in (("bos", 1), ("eos", 2), ("unk", 0)):
        getattr(writer, f"add_{role}_token_id")(token)
    writer.add_add_bos_token(True)  # type: ignore[attr-defined]
    writer.add_eot_token_id(260)  # type: ignore[attr-defined]


def _weights(seed: int, vocabulary: int) -> list[tuple[str, NDArray[np.float32]]]:
    draw = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> NDArray[np.float32]:
        return (draw.standard_normal((rows, columns)) / np.sqrt(columns)).astype(np.float32)

    found = [
        ("token_embd.weight", matrix(vocabulary, 128) * np.float32(11)),
        ("output_norm.weight", np.ones(128, np.float32)),
        ("output.weight", matrix(vocabulary, 128) * np.float32(3)),
    ]
    for layer in range(2):
        shapes = {"attn_q": (128, 128), "attn_k": (64, 128), "attn_v": (64, 128), "attn_output": (128, 128)}
        shapes |= {"ffn_gate": (256, 128), "ffn_up": (256, 128), "ffn_down": (128, 256)}
        found += [(f"blk.{layer}.{name}.weight", matrix(*shape)) for name, shape in shapes.items()]
        found += [(f"blk.{layer}.{name}.weight", np.ones(128, np.float32)) for name in ("attn_norm", "ffn_norm")]
    return found
