"""The GPU checks, on fakes: what they accept, what they must catch, and what a machine without a GPU gets."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from bootstrap.probe import RecordedMachine
from devicecheck import checks, main
from devicecheck.checks import Bench, Verdict

from edgellama.engine.base import Batch, EngineOptions
from edgellama.engine.ggml import Device
from edgellama.errors import EngineLoadError

VOCABULARY = 300
SIZE = 100_000_000
TRANSCRIPTS = Path(__file__).parents[1] / "data" / "transcripts"


class Machine:
    """A GPU and what goes wrong with it. Logits come from a hash of token and position, equal on every device."""

    def __init__(self, *, gpu: bool = True, takes: int = SIZE, noise: float = 0.0, poison: bool = False) -> None:
        self.gpu, self.takes, self.noise, self.poison = gpu, takes, noise, poison
        self.used = 0
        self.now = 0.0
        self.refuse: Callable[[EngineOptions], bool] = lambda options: False
        self.gpu_seconds = 0.01

    def devices(self) -> list[Device]:
        cpu = Device("CPU", "a CPU", "cpu", None, None)
        return [Device("CUDA0", "a GPU", "gpu", 10**9 - self.used, 10**9), cpu] if self.gpu else [cpu]

    def load(self, path: str, options: EngineOptions, on_progress: Any = None) -> Any:
        if self.refuse(options):
            raise EngineLoadError("flash attention is needed for that cache")
        on_gpu = self.gpu and options.gpu_layers != 0
        self.used = self.takes if on_gpu else 0
        return FakeEngine(self, on_gpu=on_gpu)

    def bench(self, tmp_path: Path) -> Bench:
        return Bench("m.gguf", tmp_path / "reference.json", self.load, self.devices, lambda: self.now)


class FakeEngine:
    info = SimpleNamespace(size_bytes=SIZE)
    tokenizer = SimpleNamespace(tokenize=lambda text, **_: [ord(c) % VOCABULARY for c in text])

    def __init__(self, machine: Machine, *, on_gpu: bool) -> None:
        self._machine, self._on_gpu = machine, on_gpu

    def decode(self, batch: Batch) -> np.ndarray[Any, np.dtype[np.float32]]:
        self._machine.now += self._machine.gpu_seconds if self._on_gpu else 0.05
        rows = [
            self._row(int(t), int(p))
            for t, p, w in zip(batch.tokens, batch.positions, batch.want_logits, strict=True)
            if w
        ]
        logits = np.array(rows, np.float32).reshape(len(rows), VOCABULARY)
        if self._on_gpu and self._machine.poison:
            logits[:, 3] = np.nan
        return logits

    def _row(self, token: int, position: int) -> Any:
        seed = int.from_bytes(hashlib.sha256(f"{token} {position}".encode()).digest()[:8], "little")
        random = np.random.default_rng(seed)
        row = random.normal(0, 3, VOCABULARY)
        return row + random.normal(0, self._machine.noise, VOCABULARY) if self._on_gpu else row

    def close(self) -> None:
        self._machine.used = 0


def run(machine: Machine, tmp_path: Path, *names: str) -> list[Verdict]:
    bench = machine.bench(tmp_path)
    return [checks.run(bench, name) for name in names]


def test_a_sound_gpu_passes_everything(tmp_path: Path) -> None:
    verdicts = run(Machine(noise=0.01), tmp_path, *checks.names())
    assert {verdict.outcome for verdict in verdicts} == {"pass"}
    assert len(verdicts) == 3 + 2 * len(checks.KV_TYPES) + len(checks.SEQUENCES)


@pytest.mark.parametrize("fault", [{"noise": 2.0}, {"poison": True}])
def test_wrong_numbers_are_caught(tmp_path: Path, fault: dict[str, Any]) -> None:
    verdict = run(Machine(**fault), tmp_path, "reference", "logits:on:f16")[-1]
    assert verdict.outcome == "fail"


def test_weights_that_stay_on_the_cpu_are_caught(tmp_path: Path) -> None:
    assert run(Machine(takes=SIZE // 10), tmp_path, "offload")[0].outcome == "fail"


def test_a_combination_that_is_refused_is_a_warning(tmp_path: Path) -> None:
    machine = Machine()
    machine.refuse = lambda options: options.kv_type_key == "q5_1"
    verdict = run(machine, tmp_path, "reference", "logits:on:q5_1")[-1]
    assert verdict.outcome == "warn"
    assert "refused" in verdict.detail


def test_a_gpu_slower_than_the_cpu_is_a_warning(tmp_path: Path) -> None:
    machine = Machine()
    machine.gpu_seconds = 0.5
    assert run(machine, tmp_path, "speed:1")[0].outcome == "warn"


def test_speed_counts_tokens_of_all_sequences(tmp_path: Path) -> None:
    verdict = run(Machine(), tmp_path, "speed:8")[0]
    assert verdict.figures["generation_tokens_per_second"] == pytest.approx(8 / 0.01, rel=0.01)


def test_without_flash_attention_the_value_cache_is_not_quantized() -> None:
    assert checks.logits_options("off", "q8_0").kv_type_value == "f16"
    assert checks.logits_options("on", "q8_0").kv_type_value == "q8_0"


def test_without_a_gpu_only_that_is_said(tmp_path: Path) -> None:
    bench = Machine(gpu=False).bench(tmp_path)
    said: list[Verdict] = []
    verdicts = main.run_all(
        "m", said.append, lambda name, model, path: checks.run(bench, name), lambda model: cast(Any, None)
    )
    assert [(v.check, v.outcome) for v in verdicts] == [("device", "skip")]
    assert said == verdicts
    assert main.exit_code(verdicts, gpu_unused=False, require_device=False) == 0
    assert main.exit_code(verdicts, gpu_unused=False, require_device=True) == 1
    assert main.exit_code(verdicts, gpu_unused=True, require_device=False) == 1


def test_a_gpu_that_the_library_lacks_is_noticed() -> None:
    there, lines = main.why_no_device(RecordedMachine.read(TRANSCRIPTS / "debian12_rtx4090_no_toolkit.txt"))
    assert there
    assert any("RTX 4090" in line for line in lines)
    assert not main.why_no_device(RecordedMachine())[0]


def test_a_failed_check_is_exit_1() -> None:
    assert (
        main.exit_code([Verdict("x", "pass", ""), Verdict("y", "fail", "")], gpu_unused=False, require_device=False)
        == 1
    )


def test_a_child_that_dies_is_a_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    verdict = main.run_child("offload", "m", tmp_path / "r")
    assert verdict.outcome == "fail"
    assert "exit status 1" in verdict.detail


def test_every_verdict_is_one_json_line() -> None:
    line = Verdict("x", "pass", "zwei\nlines", {"a": 1.5, "b": None}).json()
    assert "\n" not in line
    assert '"outcome":"pass"' in line
