"""quantize_file: a GGUF file in, a smaller one out, byte for byte what llama-quantize writes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

from edgellama.codecs.base import codec
from edgellama.errors import InvalidFileError, NotFoundError, UsageError
from edgellama.gguf_io import GGMLType, Header, TensorInfo, Typed, ValueType, file_identity, read, require_model
from edgellama.gguf_io.types import BLOCKS
from edgellama.quantize import choice, layout, pipeline
from edgellama.quantize.imatrix import Imatrix, load
from edgellama.quantize.options import Options, Result, parse_override
from edgellama.quantize.protect import protect, protection
from edgellama.quantize.recipes import Recipe, recipe
from edgellama.quantize.source import codec_of

_FLOATS = frozenset({GGMLType.F32, GGMLType.F16, GGMLType.BF16})


class Job:
    """A quantization that is fully decided; `run` does it, `plan` only tells what it would give."""

    def __init__(self, source: str | os.PathLike[str], target: str | os.PathLike[str], options: Options) -> None:
        self.options = options
        self.target = Path(target)
        self.header = read(source)
        require_model(self.header)
        self.recipe = recipe(options.recipe)
        self.matrix = self._imatrix()
        self.warnings = list(self.matrix.warnings) if self.matrix else []
        self._check_target()
        ordered = sorted(self.header.tensors, key=lambda tensor: choice.tensor_order(tensor.name))
        self._original: dict[str, str] = {}
        tensors, values = self._pruned(ordered)
        if options.keep_split:
            tensors.sort(key=lambda tensor: (tensor.split, tensor.offset))
        self.decisions = self._decide(tensors)
        self._check_decisions()
        self.outputs = layout.lay_out(self.target, values, self.decisions, self._groups())

    def _imatrix(self) -> Imatrix | None:
        if self.options.imatrix is None:
            return None
        matrix = load(self.options.imatrix).filtered(self.options.include_weights, self.options.exclude_weights)
        return matrix if matrix.entries else None

    def _check_target(self) -> None:
        if self.target.is_dir():
            raise UsageError(f"{self.target} is a folder", "name the file to write")
        if not self.target.absolute().parent.is_dir():
            raise NotFoundError(f"{self.target.parent}: no such folder", "make it first, or name another target")
        if any(self.target.exists() and self.target.samefile(path) for path in self.header.paths):
            raise UsageError(f"{self.target}: source and target are the same file", "name another target")

    def _pruned(self, ordered: Sequence[TensorInfo]) -> tuple[list[TensorInfo], dict[str, object]]:
        """Tensors under their final names, and the metadata of the output."""
        overrides = dict(parse_override(text) for text in self.options.override_kv)
        values = layout.metadata(self.header, self.recipe, overrides, self.matrix)
        if not self.options.prune_layers:
            self._original = {tensor.name: tensor.name for tensor in ordered}
            return list(ordered), values
        kept, layers = layout.pruned_names((tensor.name for tensor in ordered), self.options.prune_layers)
        self._original = {new: old for old, new in kept.items()}
        key = f"{self.header.architecture}.block_count"
        values.pop(key, None)
        values[key] = Typed(layers, ValueType.UINT32)
        return [tensor._replace(name=kept[tensor.name]) for tensor in ordered if tensor.name in kept], values

    def _decide(self, tensors: Sequence[TensorInfo]) -> list[choice.Decision]:
        options = self.options
        decisions = choice.choose(
            tensors, self.recipe, _model(self.header), options.overrides, has_importance=self.matrix is not None
        )
        if options.protect is not None:
            decisions = protect(decisions, protection(options.protect), self.header.layers)
        exact = options.types
        return [replace(d, type=exact[n], wanted=exact[n]) if (n := d.tensor.name) in exact else d for d in decisions]

    def _groups(self) -> list[list[int]]:
        if self.options.keep_split and len(self.header.paths) > 1:
            groups: list[list[int]] = [[] for _ in self.header.paths]
            for index, decision in enumerate(self.decisions):
                groups[decision.tensor.split].append(index)
            return groups
        if self.options.split_max_bytes is not None:
            return layout.groups_by_size(self.decisions, self.options.split_max_bytes)
        return [list(range(len(self.decisions)))]

    def _check_decisions(self) -> None:
        for decision in self.decisions:
            tensor = decision.tensor
            if decision.type is tensor.type:
                continue
            if tensor.type not in _FLOATS and not self.options.allow_requantize:
                raise UsageError(
                    f"{tensor.name} is {tensor.type.name} already: quantizing it again loses quality twice",
                    "start from an F16, BF16 or F32 file, or say --allow-requantize",
                )
            codec_of(decision.type)
            if decision.needs_importance and self.weights(tensor) is None:
                raise UsageError(
                    f"{tensor.name} would become {decision.type.name}, which needs an importance matrix",
                    "collect one (edgellama imatrix) and give it with --imatrix, or choose a larger recipe",
                )
            self.weights(tensor)

    def weights(self, tensor: TensorInfo) -> NDArray[np.float32] | None:
        """Importance of a tensor's inputs, float32[experts, k], or None. Raises InvalidFileError if it does not fit."""
        found = self.matrix.entries.get(self._original[tensor.name]) if self.matrix else None
        return self._fitted(tensor, found)

    def true_weights(self, tensor: TensorInfo) -> NDArray[np.float32] | None:
        """As `weights`, but 0 for inputs that were never active: their errors do not matter."""
        return self._fitted(tensor, self.matrix.true_weights(self._original[tensor.name]) if self.matrix else None)

    def _fitted(self, tensor: TensorInfo, found: NDArray[np.float32] | None) -> NDArray[np.float32] | None:
        if found is None:
            return None
        k, experts = tensor.shape[0], tensor.shape[2] if len(tensor.shape) > 2 else 1
        if found.size == k * experts:
            return found.reshape(experts, k)
        if choice.category(tensor.name) == "embedding":
            return None
        raise InvalidFileError(
            f"{self.options.imatrix}: {tensor.name} has {found.size} values, the tensor needs {k} x {experts}",
            "the importance matrix was collected from another model",
        )

    def plan(self) -> Result:
        """What the run will give, without its time."""
        extra = 0
        for decision in self.decisions:
            if decision.fell_back:
                block, size = BLOCKS[decision.wanted]
                ideal = decision.tensor.elements * size // block
                extra += layout.nbytes_as(decision.tensor, decision.type) - ideal
        counts: dict[str, int] = {}
        for decision in self.decisions:
            counts[decision.type.name] = counts.get(decision.type.name, 0) + 1
        return Result(
            bytes=sum(placed.nbytes for output in self.outputs for placed in output.tensors),
            source_bytes=self.header.weights_bytes,
            parameters=sum(decision.tensor.elements for decision in self.decisions),
            seconds=0.0,
            types=counts,
            decisions=self.decisions,
            paths=[output.path for output in self.outputs],
            fallback_bytes=extra,
            warnings=self.warnings,
        )

    def run(self, on_progress: Callable[[float, str], None] | None = None) -> Result:
        """Write the file(s); `on_progress(fraction, tensor)` is called for every slab."""
        started = time.perf_counter()

        def report(progress: pipeline.Progress) -> None:
            if on_progress is not None:
                on_progress(progress.done_bytes / max(1, progress.total_bytes), progress.tensor)

        pipeline.run(
            self.outputs,
            self.header.paths,
            self.weights,
            identity=self._identity(),
            threads=self.options.threads or cores(),
            resume=self.options.resume,
            on_progress=report,
        )
        result = self.plan()
        result.seconds = time.perf_counter() - started
        return result

    def _identity(self) -> str:
        """What a part file must agree in to be resumed: source, and the importance matrix's values."""
        parts = [file_identity(path) for path in self.header.paths]
        if self.options.imatrix is not None:
            parts.append(file_identity(self.options.imatrix) if self.matrix else "")
        return "\n".join(parts)


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _model(header: Header) -> choice.Model:
    heads, heads_kv = header.head_counts, header.head_counts_kv
    return choice.Model(
        architecture=header.architecture,
        layers=header.layers,
        experts=header.number("expert_count"),
        heads=heads[0] if heads else 0,
        heads_kv=heads_kv[0] if heads_kv else 0,
    )


def quantize_file(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    options: Options | None = None,
    *,
    on_progress: Callable[[float, str], None] | None = None,
) -> Result:
    """Quantize a GGUF model. `target` appears complete or not at all; an existing one is replaced on success only.

    Raises GGUFError, InvalidFileError (not finite, overflow, wrong importance matrix), UsageError, DiskFullError.
    """
    return Job(source, target, options or Options()).run(on_progress)


def quantize_rows(
    rows: NDArray[np.float32], type: GGMLQuantizationType, weights: NDArray[np.float32] | None = None
) -> NDArray[np.uint8]:
    """float32[n, k] -> uint8[n, row_bytes] of a tensor type; `weights` float32[k] are importances of the inputs."""

    return codec(type).quantize(rows, weights)


__all__ = ["Job", "Options", "Recipe", "Result", "quantize_file", "quantize_rows"]
