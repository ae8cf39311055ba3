"""What the host knows of a model before any engine opens it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from edgellama import gguf_io
from edgellama.engine.base import EngineOptions
from edgellama.engine.probe import SIDECAR_SUFFIX, FileMark
from edgellama.errors import EdgellamaError, InvalidFileError, NotFoundError, UsageError
from edgellama.runtime.plan import CacheShape
from edgellama.sampling.options import BUILT_IN, SamplingOptions

EngineName = Literal["llamacpp", "jit", "fake"]

_GGUF_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_last_n": "repeat_last_n",
    "penalty_repeat": "repeat_penalty",
}
"""llama.cpp's keys under `general.sampling.` and our names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A validated model file and how to run it. Made by `from_file`."""

    name: str
    path: str
    engine: EngineName
    options: EngineOptions
    identity: str
    """Changes with the file; see `gguf_io.file_identity`."""
    mark: FileMark
    """What a reference sidecar must name."""
    architecture: str
    shape: CacheShape
    weights_bytes: int
    trained_context_tokens: int
    template: str = ""
    """Source of the chat template in the file, empty if there is none."""
    template_name: str = ""
    """A template family to use instead of the file's."""
    sampling: tuple[SamplingOptions, ...] = (BUILT_IN,)
    """Defaults below the request, the strongest first."""
    notices: tuple[str, ...] = ()
    """What the user should know of the file."""

    @property
    def sidecar(self) -> Path:
        """Where reference logits of this file may lie."""
        return Path(self.path + SIDECAR_SUFFIX)

    @classmethod
    def from_file(
        cls,
        path: str | os.PathLike[str],
        *,
        name: str = "",
        options: EngineOptions | None = None,
        engine: EngineName = "llamacpp",
        catalogue_sampling: SamplingOptions | None = None,
        settings_sampling: SamplingOptions | None = None,
        template_name: str = "",
    ) -> ModelSpec:
        """Validate the file and read its header. Raises `GGUFError`, `InvalidFileError` or `NotFoundError`."""
        place = os.fspath(Path(path).absolute())
        above = tuple(layer for layer in (settings_sampling, catalogue_sampling) if layer is not None)
        make = _from_script if engine == "fake" else _from_gguf
        return make(place, name or Path(place).stem, options or EngineOptions(), engine, above, template_name)


def _from_gguf(
    path: str,
    name: str,
    options: EngineOptions,
    engine: EngineName,
    above: tuple[SamplingOptions, ...],
    template_name: str,
) -> ModelSpec:
    header = gguf_io.read(path)
    gguf_io.require_model(header)
    for adapter in options.loras:
        _require_adapter(adapter.path, header)
    sampling, notices = _gguf_sampling(header.sampling_defaults)
    notices += _long_context(header, options.context_tokens)
    return ModelSpec(
        name=name,
        path=path,
        engine=engine,
        options=options,
        identity=gguf_io.file_identity(header),
        mark=FileMark(size_bytes=header.file_size, header_sha256=_header_hash(header)),
        architecture=header.architecture,
        shape=CacheShape.from_header(header),
        weights_bytes=header.weights_bytes,
        trained_context_tokens=header.context_tokens,
        template=header.chat_templates.get("default", ""),
        template_name=template_name,
        sampling=(*above, sampling, BUILT_IN),
        notices=(*header.notices, *notices),
    )


def _from_script(
    path: str,
    name: str,
    options: EngineOptions,
    engine: EngineName,
    above: tuple[SamplingOptions, ...],
    template_name: str,
) -> ModelSpec:
    from edgellama.engine.fake import read_script

    script = read_script(path)
    data, info = Path(path).read_bytes(), Path(path).stat()
    digest = hashlib.sha256(data).hexdigest()
    return ModelSpec(
        name=name.removesuffix(".fake"),
        path=path,
        engine=engine,
        options=options,
        identity=_script_identity(digest, info),
        mark=FileMark(size_bytes=info.st_size, header_sha256=digest),
        architecture="fake",
        shape=CacheShape(),
        weights_bytes=script.size_bytes,
        trained_context_tokens=script.trained_context_tokens,
        template=script.chat_template,
        template_name=template_name,
        sampling=(*above, BUILT_IN),
    )


def current_identity(path: str, engine: str) -> str | None:
    """What `ModelSpec.identity` of the file would be now; None when it is gone or no longer readable as a model."""
    try:
        if engine != "fake":
            return gguf_io.file_identity(path)
        return _script_identity(hashlib.sha256(Path(path).read_bytes()).hexdigest(), Path(path).stat())
    except (EdgellamaError, OSError):
        return None


def _script_identity(digest: str, info: os.stat_result) -> str:
    return f"{digest[:16]}{info.st_mtime_ns:x}"


def _gguf_sampling(values: Mapping[str, object]) -> tuple[SamplingOptions, list[str]]:
    """The file's sampling defaults; values out of range are told and left out."""
    given: dict[str, float | int] = {}
    notices: list[str] = []
    for key, value in values.items():
        option = _GGUF_SAMPLING.get(key)
        if option is None or isinstance(value, bool) or not isinstance(value, int | float):
            continue
        number = int(value) if option in {"top_k", "repeat_last_n"} else float(value)
        try:
            SamplingOptions(**{option: number})  # type: ignore[arg-type]
        except UsageError as error:
            notices.append(f"the file's general.sampling.{key} is ignored: {error.message}")
        else:
            given[option] = number
    return SamplingOptions(**given), notices  # type: ignore[arg-type]


def _require_adapter(path: str, model: gguf_io.Header) -> None:
    """Raise `NotFoundError` or `InvalidFileError` unless the file is a LoRA adapter for this kind of model."""
    if not Path(path).exists():
        raise NotFoundError(f"--lora {path}: no such file", "name the GGUF file of a LoRA adapter")
    found = gguf_io.read(path)
    advice = f"name an adapter that was made for {model.path}"
    if found.kind != "adapter":
        raise InvalidFileError(f"--lora {path} is no LoRA adapter: it is of kind {found.kind!r}", advice)
    if found.architecture and found.architecture != model.architecture:
        kinds = f"is for {found.architecture} models, this one is of kind {model.architecture}"
        raise InvalidFileError(f"--lora {path} {kinds}", advice)


def _long_context(header: gguf_io.Header, wanted: int) -> list[str]:
    """What to say of a context longer than trained. Raises `UsageError` where such positions do not exist."""
    trained = header.context_tokens
    if not 0 < trained < wanted:
        return []
    if header.has_learned_positions:
        raise UsageError(
            f"{header.path}: --ctx {wanted}, but this model has no positions beyond {trained}", f"use --ctx {trained}"
        )
    return [f"the model was trained for {trained:,} tokens: beyond them its answers get worse"]


def _header_hash(header: gguf_io.Header) -> str:
    digest = hashlib.sha256()
    for path, length in zip(header.paths, header.header_bytes, strict=True):
        left = length
        try:
            with Path(path).open("rb") as stream:
                while left > 0 and (chunk := stream.read(min(left, 1 << 20))):
                    digest.update(chunk)
                    left -= len(chunk)
        except OSError as error:
            raise NotFoundError(f"{path}: {error.strerror or error}", "check that the medium is still there") from error
    return digest.hexdigest()
