"""Wiring: which model, which layers of options, and the first chat's one notice."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgellama import errors, settings
from edgellama.cli import doctor_backend, wiring
from edgellama.cli.common import Output
from edgellama.cli.engine_options import EngineChoice, load_settings, to_engine_options
from edgellama.engine import probe
from edgellama.store import StoredModel
from edgellama.store.catalogue import default

Call = Callable[..., Any]
GPU = {"name": "CUDA0", "kind": "gpu"}
CPU = {"name": "CPU", "kind": "cpu"}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "m.fake.json"
    path.write_text(json.dumps({"say": "hi"}))
    return path


def test_options_over_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGELLAMA_THREADS", "3")
    monkeypatch.setenv("EDGELLAMA_CONTEXT", "1000")
    choice = EngineChoice(ctx=2000, kv_type="q8_0:f16", gpu_layers="auto", parallel=2)
    options = to_engine_options(load_settings(choice), choice)
    assert (options.threads, options.context_tokens, options.sequences, options.gpu_layers) == (3, 2000, 2, -1)
    assert (options.kv_type_key, options.kv_type_value) == ("q8_0", "f16")


def test_sampling_layers_stand_in_the_contract_order(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's settings, the catalogue, the file, the built-in values."""
    monkeypatch.setenv("EDGELLAMA_TOP_K", "7")
    stored = StoredModel(model, "m", default())
    spec = wiring.make_spec(stored, settings.load(), EngineChoice())
    assert spec.sampling[0].top_k == 7
    assert spec.sampling[1].temperature == default().sampling["temperature"]
    assert spec.sampling[-1].temperature == 0.8  # llama.cpp's


def test_loras_are_paired_and_must_exist(tmp_path: Path, call: Call) -> None:
    from edgellama.cli.engine_options import pair_loras

    first, second = tmp_path / "a.gguf", tmp_path / "b.gguf"
    first.touch()
    second.touch()
    assert pair_loras((str(first), str(second)), (0.5,)) == ((str(first), 0.5), (str(second), 1.0))
    with pytest.raises(errors.NotFoundError):
        pair_loras((str(tmp_path / "none.gguf"),), ())
    with pytest.raises(errors.UsageError):
        pair_loras((str(first),), (float("nan"),))


@pytest.mark.parametrize(
    ("report", "words", "message"),
    [
        ({"devices": [CPU]}, [], "no device but the processor"),
        ("died of an illegal instruction", [], "illegal instruction"),
        ({"devices": [GPU]}, ["--gpu-layers", "0"], "contradict"),
    ],
)
def test_require_device_refuses_early(
    report: Any, words: list[str], message: str, model: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_backend, "ask_child", lambda: report)
    result = call("run", str(model), "--prompt", "x", "--require-device", *words)
    assert result.code == 2
    assert message in result.err


def test_the_ladder_still_calls_its_last_rung_so() -> None:
    """`--require-device` knows it by this name."""
    from edgellama.engine.base import EngineOptions

    names = [rung.name for rung in probe.ladder(EngineOptions(), 4)]
    assert wiring._CPU_RUNG in names


def test_the_first_chat_tells_once_what_the_proving_model_is(
    call: Call, model: Path, monkeypatch: pytest.MonkeyPatch, scripted: Any
) -> None:
    stored = StoredModel(model, "smollm2-135m-instruct", default())
    monkeypatch.setattr(wiring, "find_model", lambda *_arguments: stored)
    monkeypatch.setattr("edgellama.monitor.memory.available_bytes", lambda *_arguments: 16 << 30)
    scripted.say("ok")
    first, second = call("chat", stdin="x\n"), call("chat", stdin="x\n")
    assert "smollm2-135m-instruct only proves that this machine works" in first.err
    shown = [line for line in first.err.splitlines() if line.startswith("  ") and "GB" in line]
    assert len(shown) == 3
    assert "only proves" not in second.err


def test_a_missing_default_is_asked_from_the_store(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    class Store:
        def resolve(self, model: str, **_options: Any) -> StoredModel:
            seen.append(model)
            raise errors.OfflineError("not here")

    monkeypatch.setattr("edgellama.store.Store", Store)
    out = Output()
    for choice in ({}, {"default_model": "mine"}):
        with pytest.raises(errors.OfflineError):
            wiring.find_model(None, settings.Settings(**choice), out)
    with pytest.raises(errors.OfflineError):
        wiring.find_model("given", settings.Settings(default_model="mine"), out)
    assert seen == [default().name, "mine", "given"]


def test_a_default_model_that_does_not_exist_names_its_setting(
    monkeypatch: pytest.MonkeyPatch, call: Call, tmp_path: Path
) -> None:
    monkeypatch.setenv("EDGELLAMA_DEFAULT_MODEL", "nosuchmodel")
    result = call("run", "--prompt", "x")
    assert result.code == 3
    assert "the setting default_model, from EDGELLAMA_DEFAULT_MODEL" in result.err
    assert "default_model" not in call("run", "othermodel", "--prompt", "x").err
