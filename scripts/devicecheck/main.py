"""Run every check in a process of its own and say one verdict for each."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from bootstrap import backends
from bootstrap.probe import Probe, ThisMachine

from devicecheck import checks
from devicecheck.checks import Verdict
from edgellama.errors import EdgellamaError

CHILD_SECONDS = 300
Child = Callable[[str, str, Path], Verdict]
_MARKS = {"pass": "ok  ", "warn": "warn", "fail": "FAIL", "skip": "skip"}


def child_main(name: str, model: str, reference: Path) -> int:
    """The child: one check, its verdict as the last line of stdout."""
    from edgellama.engine import factory, ggml

    bench = checks.Bench(model, reference, factory("llamacpp"), ggml.devices)
    try:
        verdict = checks.run(bench, name)
    except EdgellamaError as error:
        verdict = Verdict(name, "fail", str(error))
    sys.stdout.write("\n" + verdict.json() + "\n")
    return 0


def run_child(name: str, model: str, reference: Path) -> Verdict:
    """Run one check in a process; a crash or a hang is its verdict."""
    command = [sys.executable, "-m", "devicecheck", "--child", name, "--model", model, "--reference", str(reference)]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=CHILD_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Verdict(name, "fail", f"no answer within {CHILD_SECONDS} seconds")
    lines = done.stdout.splitlines()
    if done.returncode == 0 and lines:
        return Verdict(**json.loads(lines[-1]))
    last = (done.stderr.strip().splitlines() or ["no output"])[-1]
    names = {s.value: s.name for s in signal.Signals}
    ending = names.get(-done.returncode, f"exit status {done.returncode}")
    return Verdict(name, "fail", f"the process ended with {ending}: {last[:300]}", {"status": done.returncode})


def ladder(model: str) -> Verdict:
    """Whether edgellama proves the model by itself from nothing, on the device, and answers."""
    with tempfile.TemporaryDirectory() as folder:
        environ = {**os.environ, "EDGELLAMA_CACHE_DIR": folder}
        command = [
            sys.executable,
            "-m",
            "edgellama",
            "run",
            model,
            "--temperature",
            "0",
            "--max-tokens",
            "24",
            "--json",
        ]
        done = subprocess.run(
            [*command, "--prompt", "Which city is the capital of France?"],
            stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8", env=environ, check=False,
        )  # fmt: skip
    notices = done.stderr.strip()
    if done.returncode != 0:
        return Verdict("ladder", "fail", notices[-500:], {"status": done.returncode})
    text = str(json.loads(done.stdout.splitlines()[-1])["text"])
    return Verdict("ladder", "pass" if text.strip() else "fail", text.strip()[:200], {"notices": notices[-1000:]})


def run_all(
    model: str, report: Callable[[Verdict], None], child: Child = run_child, climb: Callable[[str], Verdict] = ladder
) -> list[Verdict]:
    """Run every check; without a device only that is said."""
    verdicts: list[Verdict] = []

    def keep(verdict: Verdict) -> None:
        verdicts.append(verdict)
        report(verdict)

    with tempfile.TemporaryDirectory() as folder:
        reference = Path(folder) / "reference.json"
        for name in checks.names():
            keep(child(name, model, reference))
            if name == "device" and verdicts[-1].outcome != "pass":
                return verdicts
    keep(climb(model))
    return verdicts


def why_no_device(probe: Probe) -> tuple[bool, list[str]]:
    """Whether the machine has a GPU that the library lacks, and what the set-up says about it."""
    decision = backends.decide(probe, "auto")
    return any(": found " in line for line in decision.lines), list(decision.lines)


def exit_code(verdicts: Sequence[Verdict], *, gpu_unused: bool, require_device: bool) -> int:
    """0: all well, or no GPU here. 1: a check failed, a GPU here is not used, or one was required."""
    if any(verdict.outcome == "fail" for verdict in verdicts):
        return 1
    no_device = any(verdict.check == "device" and verdict.outcome == "skip" for verdict in verdicts)
    return 1 if no_device and (gpu_unused or require_device) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scripts/device_check", description=__doc__)
    parser.add_argument("--model", default="", help="a GGUF file (default: the default model)")
    parser.add_argument("--json", action="store_true", help="one JSON object per check")
    parser.add_argument("--require-device", action="store_true", help="fail where there is no GPU")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    parser.add_argument("--reference", type=Path, default=Path(), help=argparse.SUPPRESS)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code."""
    options = _parser().parse_args(arguments)
    if options.child:
        return child_main(options.child, options.model, options.reference)

    def report(verdict: Verdict) -> None:
        line = verdict.json() if options.json else f"{_MARKS[verdict.outcome]}  {verdict.check}: {verdict.detail}"
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    try:
        model = options.model or _default_model()
        verdicts = run_all(model, report)
    except EdgellamaError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    gpu_unused = False
    if verdicts[0].outcome == "skip":
        gpu_unused, lines = why_no_device(ThisMachine())
        sys.stderr.write("".join(f"{line}\n" for line in lines))
        if gpu_unused:
            sys.stderr.write("A GPU is here that llama.cpp was not built for: ./scripts/chat --rebuild\n")
    return exit_code(verdicts, gpu_unused=gpu_unused, require_device=options.require_device)


def _default_model() -> str:
    from edgellama.store import Store, default_model

    return str(Store().resolve(default_model().name, offline=True).path)
