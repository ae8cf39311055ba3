"""What llama.cpp tells about a loaded model."""

from __future__ import annotations

from typing import Any

from edgellama.engine import ggml
from edgellama.engine.base import EngineOptions, ModelInfo
from edgellama.engine.llamacpp.bindings import backend_build
from edgellama.engine.llamacpp.loading import Loaded, description, metadata


def describe(library: Any, handles: Loaded, options: EngineOptions) -> ModelInfo:
    """The facts of one load."""
    model = handles.model
    return ModelInfo(
        architecture=metadata(library, model, "general.architecture") or "",
        description=description(library, model),
        parameters=int(library.llama_model_n_params(model)),
        size_bytes=int(library.llama_model_size(model)),
        layers=int(library.llama_model_n_layer(model)),
        embedding_length=int(library.llama_model_n_embd_out(model)),
        vocabulary_tokens=int(library.llama_vocab_n_tokens(library.llama_model_get_vocab(model))),
        trained_context_tokens=int(library.llama_model_n_ctx_train(model)),
        context_tokens=handles.context_tokens,
        sequences=options.sequences,
        engine="llamacpp",
        backend_build=backend_build(),
        devices=tuple(d.name for d in ggml.devices() if d.kind in ("cpu", "accel") or options.gpu_layers),
        threads=handles.threads[0],
    )
