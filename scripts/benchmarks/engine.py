"""`scripts/bench engine`: prefill and decode through the worker process, against a bare llama_decode loop.

Both run in processes of their own with equal settings, take turns in every round, and decode the same number of tokens
after equally long prompts that no cache knows. The worker's figures are what a client sees: they include sampling,
detokenizing, messages and the pipe. On a busy machine only CPU time tells the overhead, with one thread. No speed is
told for an engine whose numbers are wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks import _report
from edgellama import paths
from edgellama.engine import probe
from edgellama.engine.base import EngineOptions
from edgellama.errors import EdgellamaError, EngineError, NotFoundError, NumericError
from edgellama.runtime.messages import Finished, Generate, Load, Loaded, Probe, Step
from edgellama.runtime.supervisor import Death, Worker
from edgellama.sampling.options import SamplingOptions

DECODE_GOAL, OVERHEAD_GOAL_MICROSECONDS = 0.97, 150.0


def parse(arguments: list[str]) -> argparse.Namespace:
    """Options of this benchmark."""
    parser = argparse.ArgumentParser(prog="scripts/bench engine", description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="GGUF file; by default the default model in the store")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--steps", type=int, default=64, help="tokens decoded one by one per round")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--gpu-layers", type=int, default=-1)
    parser.add_argument("--no-repack", action="store_true")
    parser.add_argument("--flash-attention", choices=("auto", "on", "off"), default="auto")
    return parser.parse_args(arguments)


def default_model() -> Path:
    """The default model's file in the store."""
    found = sorted(paths.models_dir().rglob("SmolLM2-135M-Instruct*.gguf"))
    if not found:
        raise NotFoundError(f"no default model in {paths.models_dir()}", "give --model FILE, or run scripts/chat once")
    return found[0]


class Bare:
    """The bare loop's process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, path: Path, options: EngineOptions) -> Bare:
        """Start it and wait for its model."""
        here = Path(__file__).with_name("_bare.py")
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(here),
            stdin=pipe,
            stdout=pipe,
            start_new_session=True,  # as the worker: Linux shares a busy machine between sessions, not processes
        )
        bare = cls(process)
        await bare.ask({"path": str(path), "options": msgspec.to_builtins(options)})
        return bare

    async def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """One request, one answer."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps(request).encode() + b"\n")
        await stdin.drain()
        line = await stdout.readline()
        if not line:
            raise EngineError("the bare loop's process ended")
        return dict(json.loads(line))

    async def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()


async def through_worker(worker: Worker, name: str, prompt: list[int], steps: int) -> dict[str, float]:
    """One request as its client sees it: seconds to the first token, and seconds per token after it."""
    queue = worker.open(name)
    sampling = SamplingOptions(temperature=0.0, ignore_eos=True)
    begun = time.perf_counter()
    worker.send(Generate(request_id=name, prompt=tuple(prompt), sampling=sampling, max_tokens=steps + 1))
    times: list[float] = []
    cpu: list[float] = []
    while True:
        message = await queue.get()
        if isinstance(message, Step):
            times.append(time.perf_counter())
            cpu.append(_report.cpu_seconds(worker.pid))
        elif isinstance(message, Finished):
            break
        elif isinstance(message, Death):
            raise EngineError(f"the worker {message.words}")
        elif getattr(message, "kind", ""):
            raise EngineError(f"the request failed: {message}")
    worker.forget(name)
    if len(times) != steps + 1 or message.cached_tokens:
        raise EngineError(f"{len(times)} of {steps + 1} tokens came, {message.cached_tokens} of the prompt were cached")
    return {
        "prompt_seconds": times[0] - begun,
        "step_seconds": (times[-1] - times[0]) / steps,
        "step_cpu_seconds": (cpu[-1] - cpu[0]) / steps,
    }


async def spawn(path: Path, options: EngineOptions) -> tuple[Worker, Loaded]:
    """A worker with the model."""
    worker = await Worker.spawn()
    try:
        await worker.ready()
        return worker, await worker.load(Load(path=str(path), options=options))
    except BaseException:
        await worker.close()
        raise


async def logits(worker: Worker, loaded: Loaded, tokens: tuple[int, ...]) -> tuple[tuple[int, ...], Any]:
    """The probe's tokens and logits, float32[positions, vocabulary]."""
    probed = await worker.probe(Probe(tokens=tokens))
    rows = np.frombuffer(probed.logits, "<f4").reshape(-1, loaded.info.vocabulary_tokens)
    return probed.tokens, rows


async def check(path: Path, options: EngineOptions, worker: Worker, loaded: Loaded) -> str:
    """Compare the worker's logits with llama.cpp's at its plainest; raises `NumericError` when they differ."""
    plain, plain_loaded = await spawn(path, probe.plainest(options))
    try:
        tokens, expected = await logits(plain, plain_loaded, ())
    finally:
        await plain.close()
    mark = probe.FileMark(size_bytes=path.stat().st_size, header_sha256="")
    reference = probe.reference_of(mark, "llama.cpp at its plainest", tokens, expected)
    _, found = await logits(worker, loaded, tokens)
    result = probe.compare(found, reference, probe.tolerance(options))
    if result.verdict != "agreed":
        raise NumericError(f"no speed is told: {result.words}", "try --no-repack or --flash-attention off")
    return result.words


async def measure(choice: argparse.Namespace, path: Path) -> dict[str, Any]:
    """All rounds, and their report."""
    tokens = choice.prompt_tokens + choice.steps + 1
    options = EngineOptions(
        context_tokens=(tokens + 255) // 256 * 256,
        threads=choice.threads,
        gpu_layers=choice.gpu_layers,
        repack_weights=not choice.no_repack,
        flash_attention=choice.flash_attention,
    )
    worker, loaded = await spawn(path, options)
    rounds: list[dict[str, dict[str, float]]] = []
    try:
        words = await check(path, options, worker, loaded)
        bare = await Bare.start(path, options)
        try:
            draw = random.Random(1)
            for number in range(choice.rounds + 1):
                one = await one_round(worker, bare, loaded, draw, choice, number)
                if number:  # the first one warms up
                    rounds.append(one)
        finally:
            await bare.close()
    finally:
        await worker.close()
    return report(choice, path, options, loaded, words, rounds)


async def one_round(
    worker: Worker, bare: Bare, loaded: Loaded, draw: random.Random, choice: argparse.Namespace, number: int
) -> dict[str, dict[str, float]]:
    """Both contestants once, the first one changing from round to round."""
    ordinary = range(min(1000, loaded.info.vocabulary_tokens // 2), loaded.info.vocabulary_tokens)
    prompt = draw.choices(ordinary, k=choice.prompt_tokens)
    answer = draw.choices(ordinary, k=choice.steps)
    found: dict[str, dict[str, float]] = {}
    for name in ("bare", "worker") if number % 2 else ("worker", "bare"):
        if name == "bare":
            found[name] = await bare.ask({"prompt": prompt, "answer": answer})
        else:
            found[name] = await through_worker(worker, f"round-{number}", prompt, choice.steps)
    return found


def report(
    choice: argparse.Namespace,
    path: Path,
    options: EngineOptions,
    loaded: Loaded,
    words: str,
    rounds: list[dict[str, dict[str, float]]],
) -> dict[str, Any]:
    """Medians and spread; ratios are taken within a round, where both had the same neighbours on the machine."""
    result: dict[str, Any] = {
        "benchmark": "engine",
        "machine": _report.machine(),
        "model": path.name,
        "description": loaded.info.description,
        "backend_build": loaded.info.backend_build,
        "threads": loaded.info.threads,
        "confinement": list(loaded.confinement),
        "options": msgspec.to_builtins(options),
        "prompt_tokens": choice.prompt_tokens,
        "steps": choice.steps,
        "rounds": len(rounds),
        "numeric_check": words,
    }
    for name in ("bare", "worker"):
        prefill = [choice.prompt_tokens / one[name]["prompt_seconds"] for one in rounds]
        decode = [1 / one[name]["step_seconds"] for one in rounds]
        result[name] = {
            "prefill_tokens_per_second": _report.spread(prefill),
            "decode_tokens_per_second": _report.spread(decode),
        }
    for kind, key in (("prefill", "prompt_seconds"), ("decode", "step_seconds")):
        ratios = [one["bare"][key] / one["worker"][key] for one in rounds]
        result[f"{kind}_ratio"] = statistics.median(ratios)
        result[f"{kind}_ratio_spread"] = _report.spread(ratios)
    for name, key in (("step", "step_seconds"), ("step_cpu", "step_cpu_seconds")):
        overheads = [1e6 * (one["worker"][key] - one["bare"][key]) for one in rounds]
        result[f"{name}_overhead_microseconds"] = _report.spread(overheads)
    result["goal_met"] = bool(
        result["decode_ratio"] >= DECODE_GOAL
        or result["step_overhead_microseconds"]["median"] <= OVERHEAD_GOAL_MICROSECONDS
    )
    return result


def show(result: dict[str, Any]) -> None:
    """The report for people."""
    machine = result["machine"]
    print(f"{result['description']} ({result['model']}), {result['threads']} threads, {result['rounds']} rounds")
    print(f"{machine['processor']}, {machine['system']}, load {machine['load_average']}, Python {machine['python']}")
    print(result["backend_build"])
    print(f"numeric check: {result['numeric_check']}")
    for name in ("bare", "worker"):
        print(_report.line(f"prefill, {name}", result[name]["prefill_tokens_per_second"], "tokens/s"))
        print(_report.line(f"decode, {name}", result[name]["decode_tokens_per_second"], "tokens/s"))
    print(_report.line("prefill_ratio", result["prefill_ratio_spread"], "", 3))
    print(_report.line("decode_ratio", result["decode_ratio_spread"], "", 3))
    print(_report.line("overhead of a step", result["step_overhead_microseconds"], "microseconds", 0))
    print(_report.line("… in CPU time", result["step_cpu_overhead_microseconds"], "microseconds, all threads", 0))


def main(arguments: list[str]) -> int:
    """Run the benchmark; exit code 6 when the numbers are wrong."""
    choice = parse(arguments)
    try:
        path = (choice.model or default_model()).resolve()
        if not path.is_file():
            raise NotFoundError(f"{path}: no such file")
        result = asyncio.run(measure(choice, path))
    except EdgellamaError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    if choice.json:
        print(json.dumps(result, indent=2))
    else:
        show(result)
    return 0
