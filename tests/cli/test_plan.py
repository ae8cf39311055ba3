"""`edgellama plan`: the contract of its JSON and its exit code."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgellama.monitor import memory

Call = Callable[..., Any]


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A scripted model of 100 MiB on a machine with 1 GiB available."""
    monkeypatch.setattr(memory, "available_bytes", lambda *_arguments: 1 << 30)
    path = tmp_path / "m.fake.json"
    path.write_text(json.dumps({"size_bytes": 100 << 20, "trained_context_tokens": 65536}))
    return str(path)


def test_what_fits(model: str, call: Call) -> None:
    result = call("plan", model, "--json")
    assert result.code == 0
    plan = json.loads(result.out)
    assert plan["fits"] is True
    assert set(plan["predicted_bytes"]) == {"weights", "kv", "compute", "other"}
    assert plan["predicted_bytes"]["weights"] == 100 << 20
    assert sum(plan["predicted_bytes"].values()) == plan["total_bytes"] <= plan["limit_bytes"] < 1 << 30
    assert plan["choice"]["context_tokens"] > 0
    assert any(other["choice"]["context_tokens"] == 65536 for other in plan["alternatives"])


def test_what_does_not_fit_prints_its_json_and_exits_5(model: str, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda *_arguments: 50 << 20)
    result = call("plan", model, "--json")
    assert result.code == 5
    plan = json.loads(result.out)
    assert plan["fits"] is False
    assert plan["total_bytes"] > plan["limit_bytes"]
    assert json.loads(result.err)["error"]["kind"] == "MemoryShortageError"


def test_options_change_the_plan(model: str, call: Call) -> None:
    choice = json.loads(call("plan", model, "--json", "--ctx", "2048", "--kv-type", "q8_0:f16").out)["choice"]
    assert choice["context_tokens"] == 2048
    assert (choice["kv_type_key"], choice["kv_type_value"]) == ("q8_0", "f16")


def test_for_people(model: str, call: Call) -> None:
    result = call("plan", model)
    assert result.code == 0
    assert " fits: " in result.out


def test_a_missing_model(call: Call, tmp_path: Path) -> None:
    assert call("plan", str(tmp_path / "none.gguf")).code == 3


def test_a_catalogue_model_that_is_not_here_is_estimated(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    from edgellama.store import catalogue, transport

    def refuse(*_arguments: object, **_named: object) -> None:
        raise AssertionError("a plan never uses the network")

    monkeypatch.setattr(transport.Transport, "get", refuse)
    monkeypatch.setattr(memory, "available_bytes", lambda *_arguments: 64 << 30)
    entry = catalogue.load()["llama-3.2-3b-instruct"]
    for name in (entry.name, entry.sources[0]):
        result = call("plan", name, "--json", "--ctx", "4096")
        assert result.code == 0
        plan = json.loads(result.out)
        assert plan["estimated"] is True
        assert plan["predicted_bytes"]["weights"] == entry.weight_bytes
        assert plan["predicted_bytes"]["kv"] == entry.kv_bytes(4096)
        assert f"edgellama pull {entry.name}" in result.err
    result = call("plan", "hf:o/r/none.gguf")
    assert result.code == 3
    assert "not here" in result.err
    assert call("plan", "no-such-model").code == 3
