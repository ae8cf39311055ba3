"""`scripts/bench quantize`: each codec beside ggml's own, and whole files beside llama-quantize, bytes compared.

Codecs run on one thread and are timed in processor time of that thread. Whole processes take turns in every round, from
start to exit, with equal threads; the files must be equal. Without --model a random model is made, large enough that
the start counts little with --full.
"""

from __future__ import annotations

import argparse
import ctypes
import filecmp
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType

from benchmarks import _report
from edgellama.codecs.base import codec, codecs
from edgellama.engine import ggml
from edgellama.errors import EdgellamaError, NotFoundError
from edgellama.gguf_io import GGMLType, TensorSpec, read, specimen, writing

RECIPES = ("Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0")
ALL_RECIPES = ("Q2_K", "Q3_K_M", "Q4_0", "Q4_1", "Q4_K_S", "Q4_K_M", "Q5_0", "Q5_1", "Q5_K_S", "Q5_K_M", "Q6_K", "Q8_0")
MORE_RECIPES = ("IQ4_NL", "IQ4_XS", "MXFP4_MOE")
ROWS, WIDTH = 128, 4096


def parse(arguments: list[str]) -> argparse.Namespace:
    """Options of this benchmark."""
    parser = argparse.ArgumentParser(prog="scripts/bench quantize", description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="GGUF file in F32, F16 or BF16")
    parser.add_argument("--imatrix", type=Path, help="importance matrix of that model")
    parser.add_argument(
        "--peer", type=Path, default=os.environ.get("EDGELLAMA_PEER"), help="folder with bin/ of llama.cpp"
    )
    parser.add_argument("--recipes", help="comma-separated")
    parser.add_argument("--types", help="comma-separated tensor types; `none` leaves the codecs out")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--full", action="store_true", help="every recipe and type, on a source of over 2 GB")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_args(arguments)


def make_source(folder: Path, layers: int, width: int) -> Path:
    """A random Llama in BF16 with weights distributed like real ones."""
    shapes, path = folder / "shapes.gguf", folder / "source.gguf"
    keys = {"llama.feed_forward_length": 4 * width, "llama.attention.head_count": width // 128}
    keys["llama.attention.head_count_kv"] = max(1, width // 512)
    specimen.build(shapes, "llama", layers=1, width=256)
    values = specimen.metadata("llama", layers=layers, width=width) | keys
    wide = {"attn_q": width, "attn_k": width // 4, "attn_v": width // 4}
    wide |= {"attn_output": width, "ffn_gate": 4 * width, "ffn_up": 4 * width}
    vocabulary = len(values["tokenizer.ggml.tokens"])  # type: ignore[arg-type]
    specs = [TensorSpec("token_embd.weight", (width, vocabulary), GGMLType.BF16)]
    specs.append(TensorSpec("output_norm.weight", (width,), GGMLType.F32))
    for layer in range(layers):
        specs += [TensorSpec(f"blk.{layer}.{n}.weight", (width, rows), GGMLType.BF16) for n, rows in wide.items()]
        specs.append(TensorSpec(f"blk.{layer}.ffn_down.weight", (4 * width, width), GGMLType.BF16))
        specs += [TensorSpec(f"blk.{layer}.{n}_norm.weight", (width,), GGMLType.F32) for n in ("attn", "ffn")]
    rng = np.random.default_rng(0)
    pool = (rng.standard_t(4, 1 << 22) * 0.02).astype(np.float32)
    with writing(path, values, specs) as out:
        for spec in specs:
            count = spec.nbytes // (2 if spec.type is GGMLType.BF16 else 4)
            for start in range(0, count, pool.size):
                part = pool[: min(pool.size, count - start)]
                data = (part.view(np.uint32) >> 16).astype(np.uint16) if spec.type is GGMLType.BF16 else part
                out.write(spec.name, data.tobytes())
    return path


def codec_speeds(names: list[str], rounds: int) -> dict[str, dict[str, Any]]:
    """Million weights per second of each codec and of ggml, one thread, without and with importance."""
    pointer = ctypes.c_void_p
    native = ggml.function(
        "ggml_quantize_chunk", ctypes.c_size_t, ctypes.c_int, pointer, pointer, *[ctypes.c_int64] * 3, pointer
    )
    rng = np.random.default_rng(0)
    x = (rng.standard_t(4, (ROWS, WIDTH)) * 0.02).astype(np.float32)
    importance = (rng.random(WIDTH) ** 2 + 1e-3).astype(np.float32)
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        kind = codec(GGMLQuantizationType[name])
        for label, weights in (("plain", None), ("imatrix", importance)):
            if weights is not None and not kind.takes_weights:
                continue
            theirs = np.zeros((ROWS, kind.row_bytes(WIDTH)), np.uint8)
            address = None if weights is None else weights.ctypes.data
            mine, other = [], []
            ours = kind.quantize(x, weights)  # compiles
            for _ in range(rounds):
                begun = time.thread_time()
                ours = kind.quantize(x, weights)
                middle = time.thread_time()
                native(int(kind.type), x.ctypes.data, theirs.ctypes.data, 0, ROWS, WIDTH, address)
                mine.append(x.size / 1e6 / (middle - begun))
                other.append(x.size / 1e6 / (time.thread_time() - middle))
            found[f"{name} {label}"] = {
                "mweights_per_second": _report.spread(mine),
                "ggml_mweights_per_second": _report.spread(other),
                "ratio": statistics.median(mine) / statistics.median(other),
                "same_bytes": bool(np.array_equal(ours, theirs)),
            }
    return found


def timed(command: list[str]) -> float:
    """Seconds of a process from start to exit."""
    begun = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise EdgellamaError(f"{command[0]} ended with {done.returncode}: {done.stderr[-300:]}")
    return time.perf_counter() - begun


def whole_files(options: argparse.Namespace, source: Path, recipes: list[str], folder: Path) -> dict[str, Any]:
    """Seconds per recipe beside llama-quantize."""
    tool = Path(options.peer or "") / "bin" / "llama-quantize"
    if not options.peer or not tool.is_file():
        raise NotFoundError(f"{tool}: no llama-quantize", "give --peer DIR, a folder with llama.cpp's bin/")
    ours, theirs = folder / "ours.gguf", folder / "theirs.gguf"
    matrix = ["--imatrix", str(options.imatrix)] if options.imatrix else []
    found: dict[str, Any] = {}
    for recipe in recipes:
        mine = [sys.executable, "-m", "edgellama", "quantize", str(source), str(ours), "--recipe", recipe, "--quiet"]
        mine += ["--threads", str(options.threads), *matrix]
        other = [str(tool), *matrix, str(source), str(theirs), recipe, str(options.threads)]
        timed(mine)  # compiles, and reads the source into the page cache
        seconds: list[float] = []
        peer_seconds: list[float] = []
        for _ in range(options.rounds):
            seconds.append(timed(mine))
            peer_seconds.append(timed(other))
        found[recipe] = {
            "seconds": _report.spread(seconds),
            "llama_quantize_seconds": _report.spread(peer_seconds),
            "ratio": statistics.median(peer_seconds) / statistics.median(seconds),
            "same_bytes": filecmp.cmp(ours, theirs, shallow=False),
            "bytes": ours.stat().st_size,
        }
        ours.unlink()
        theirs.unlink()
    return found


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All figures."""
    report: dict[str, Any] = {"machine": _report.machine()}
    own = [c.type.name for c in codecs().values() if c.kernel is not None and not c.native and c.block > 1]
    chosen = own if options.full else ["Q4_K", "Q5_K", "Q6_K", "Q8_0", "IQ4_XS"]
    names = chosen if options.types is None else [n for n in options.types.split(",") if n != "none"]
    report["codecs"] = codec_speeds(names, max(3, options.rounds))
    recipes = options.recipes.split(",") if options.recipes else list(RECIPES)
    if options.full and not options.recipes:
        recipes = [*ALL_RECIPES, *MORE_RECIPES]
    with tempfile.TemporaryDirectory(prefix="edgellama-bench-") as name:
        folder = Path(name)
        source = options.model or make_source(folder, *((14, 2560) if options.full else (8, 1024)))
        report["source_bytes"] = sum(t.nbytes for t in read(source).tensors)
        report["recipes"] = whole_files(options, source, recipes, folder)
    for recipe, figures in report["recipes"].items():
        report[f"ratio_{recipe}"] = figures["ratio"]
    return report


def show(report: dict[str, Any]) -> None:
    """The report for people."""
    print(report["machine"])
    print("one thread, million weights per second, beside ggml_quantize_chunk:")
    for name, figures in report["codecs"].items():
        same = "" if figures["same_bytes"] else "  OTHER BYTES"
        ratio = f" {figures['ratio']:.1f} x {figures['ggml_mweights_per_second']['median']:.1f}{same}"
        print(_report.line(name, figures["mweights_per_second"], "Mweights/s") + ratio)
    print(f"whole processes from {report['source_bytes']:,} bytes of weights, beside llama-quantize:")
    for name, figures in report["recipes"].items():
        same = "same bytes" if figures["same_bytes"] else "OTHER BYTES"
        peer = figures["llama_quantize_seconds"]["median"]
        print(
            _report.line(name, figures["seconds"], "s", 2)
            + f"  {figures['ratio']:.1f} x faster than {peer:.2f} s, {same}"
        )


def main(arguments: list[str]) -> int:
    """Run it; returns the exit code."""
    options = parse(arguments)
    try:
        report = measure(options)
    except EdgellamaError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    if options.json:
        print(json.dumps(report))
    else:
        show(report)
    all_same = all(f["same_bytes"] for part in ("codecs", "recipes") for f in report[part].values())
    return 0 if all_same else 1
