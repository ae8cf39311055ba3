from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from edgellama.engine.base import EngineOptions
from edgellama.engine.fake import Fault
from edgellama.engine.probe import FileMark, reference_of
from edgellama.errors import EdgellamaError, EngineCrashError, PoisonError
from edgellama.runtime.journal import Journal
from edgellama.runtime.messages import Probe
from edgellama.runtime.model import ModelSpec
from edgellama.runtime.recovery import FATAL_DEATHS, Recovery
from edgellama.runtime.supervisor import Death, Worker


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch) -> list[Probe]:
    """Every probe that is asked for."""
    asked: list[Probe] = []
    probe = Worker.probe

    async def spy(self: Worker, message: Probe) -> Any:
        asked.append(message)
        return await probe(self, message)

    monkeypatch.setattr(Worker, "probe", spy)
    return asked


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_bytes()) for path in sorted((folder / "cache" / "verdicts").glob("*.json"))]


async def start(lab: Any, script: Path, **fields: Any) -> Any:
    host = lab.make(script, **fields)
    await host.start()
    return host


# ---- verdicts


async def test_a_cached_verdict_saves_the_probe(lab: Any, probes: list[Probe]) -> None:
    script = lab.script(say=None)
    await start(lab, script, probe_seconds=10.0)
    assert len(probes) == 4  # two for the reference, one for its noise, one for the candidate
    assert [a["outcome"] for a in records(lab.folder)[0]["attempts"]] == ["agreed"]
    await start(lab, script, probe_seconds=10.0)
    assert len(probes) == 4


async def test_a_changed_file_is_checked_again(lab: Any, probes: list[Probe]) -> None:
    await start(lab, lab.script(say=None))
    before = len(probes)
    await start(lab, lab.script(say=None, seed=1))
    assert len(probes) == before + 1
    assert len(records(lab.folder)) == 2


async def test_another_build_of_the_engine_is_checked_again_from_the_top(lab: Any, probes: list[Probe]) -> None:
    script = lab.script(Fault(kind="nan", when={"repack_weights": (True,)}, times=4), say=None)
    host = await start(lab, script)
    assert (await host.status()).models[0].settings == "weight repacking off"
    (path,) = (lab.folder / "cache" / "verdicts").glob("*.json")
    record = json.loads(path.read_bytes())
    record["backend_build"] = "an older build"
    path.write_text(json.dumps(record))
    again = await start(lab, script)
    tried = [(a["rung"], a["outcome"]) for a in json.loads(path.read_bytes())["attempts"]]
    assert tried[0][0] == "as asked"
    assert (await again.status()).models[0].settings in {"", "weight repacking off"}


async def test_more_time_for_the_probe_turns_finite_only_into_a_verdict(lab: Any) -> None:
    script = lab.script(say=None)
    await start(lab, script, probe_seconds=0.0)
    assert records(lab.folder)[0]["attempts"][-1]["outcome"] == "finite-only"
    await start(lab, script, probe_seconds=10.0)
    assert records(lab.folder)[0]["attempts"][-1]["outcome"] == "agreed"


async def test_a_reference_that_takes_too_long_is_done_without(lab: Any) -> None:
    host = await start(lab, lab.script(say=None, load_seconds=1.0), probe_seconds=0.5)
    assert records(lab.folder)[0]["attempts"][-1]["outcome"] == "finite-only"
    assert (await host.status()).models[0].settings == ""


async def test_a_slow_engine_is_compared_at_fewer_tokens(lab: Any, probes: list[Probe]) -> None:
    await start(lab, lab.script(say=None, token_seconds=0.1), probe_seconds=4.0)
    assert {len(p.tokens) for p in probes} == {8}
    assert records(lab.folder)[0]["attempts"][-1]["outcome"] == "agreed"


async def test_a_start_that_is_given_up_is_no_mark_against_the_settings(lab: Any) -> None:
    script = lab.script(load_seconds=5.0)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1.0):
            await start(lab, script)
    assert [a["outcome"] for a in records(lab.folder)[0]["attempts"]] == ["interrupted"]


async def test_a_reason_that_all_settings_share_is_told_once(lab: Any) -> None:
    with pytest.raises(EdgellamaError) as caught:
        await start(lab, lab.script(Fault(kind="error", phase="load", message="injected"), say=None))
    reasons = caught.value.message.partition("Last lines")[0]
    assert reasons.count("as asked, weight repacking off") == 1
    assert reasons.count("injected") == 1
    assert caught.value.advice


async def test_a_crash_is_on_disk_before_the_next_rung_is_tried(lab: Any) -> None:
    script = lab.script(Fault(kind="signal", signal="SIGABRT", when={"repack_weights": (True,)}))
    await start(lab, script)
    attempts = records(lab.folder)[0]["attempts"]
    assert [(a["rung"], a["outcome"]) for a in attempts] == [
        ("as asked", "crashed"),
        ("weight repacking off", "finite-only"),
    ]
    assert "SIGABRT" in attempts[0]["detail"]


# ---- the sidecar


def sidecar(script: Path, logits: Any, tokens: tuple[int, ...] = tuple(range(65, 77))) -> Path:
    spec = ModelSpec.from_file(script, engine="fake")
    spec.sidecar.write_bytes(msgspec.json.encode(reference_of(spec.mark, "test", tokens, logits)))
    return spec.sidecar


async def test_the_sidecar_decides(lab: Any, probes: list[Probe]) -> None:
    """Logits that this engine never gives: no setting agrees with them."""
    from edgellama.errors import NumericError

    script = lab.script(say=None)
    vocabulary = 256 + 5
    sidecar(script, np.random.default_rng(0).normal(0, 6, (12, vocabulary)).astype(np.float32))
    with pytest.raises(NumericError, match="KL divergence"):
        await start(lab, script)
    assert all(p.tokens == tuple(range(65, 77)) for p in probes)
    assert not list((lab.folder / "cache").glob("references/*"))


async def test_a_sidecar_of_another_file_is_ignored_aloud(lab: Any, ask: Any) -> None:
    script = lab.script(say="ok")
    spec = ModelSpec.from_file(script, engine="fake")
    mark = FileMark(size_bytes=1, header_sha256="no")
    other = reference_of(mark, "test", range(9), np.random.default_rng(0).normal(size=(9, 261)).astype(np.float32))
    spec.sidecar.write_bytes(msgspec.json.encode(other))
    host = await start(lab, script)
    assert "another version" in (await ask(host)).notices("sidecar-ignored")[0]


# ---- what to do after a death


class Rungs:
    """A ladder of four rungs, without processes."""

    def __init__(self) -> None:
        self.rung = self.lean = 0
        self.bad: list[int] = []

    @property
    def words(self) -> str:
        return f"rung {self.rung}, lean {self.lean}" if self.rung or self.lean else ""

    def step_down(self, reason: str, outcome: str | None = None) -> bool:
        if outcome is not None:
            self.bad.append(self.rung)
        moved = self.rung < 3
        self.rung += moved
        return moved

    def step_leaner(self) -> bool:
        moved = self.lean < 2
        self.lean += moved
        return moved

    def go_plainest(self, *, only_memory: bool = False) -> None:
        self.lean = 2
        self.rung = self.rung if only_memory else 3


def death(returncode: int = -11) -> Death:
    return Death("serve", "exit", returncode, f"died ({returncode})")


def policy() -> tuple[Recovery, Rungs]:
    rungs = Rungs()
    return Recovery(rungs), rungs  # type: ignore[arg-type]


def test_a_first_crash_is_a_plain_restart() -> None:
    recovery, rungs = policy()
    assert "now with" not in recovery.died(Journal("a"), death())
    assert (rungs.rung, rungs.lean) == (0, 0)
    assert recovery.backoff_seconds() == 0


def test_an_illegal_instruction_steps_down_at_once_and_is_remembered() -> None:
    recovery, rungs = policy()
    assert "now with rung 1" in recovery.died(Journal("a"), death(-4))
    assert rungs.bad == [0]


def test_settings_that_killed_under_two_requests_are_left() -> None:
    recovery, rungs = policy()
    recovery.died(Journal("a"), death())
    recovery.survived()
    recovery.died(Journal("b"), death())
    assert rungs.rung == 1


def test_a_suspect_that_survives_at_the_plainest_settings_costs_one_rung() -> None:
    recovery, rungs = policy()
    suspect = Journal("a")
    recovery.died(suspect, death())
    recovery.died(suspect, death())
    assert rungs.rung == 3
    assert recovery.survived()
    assert (rungs.rung, rungs.lean) == (1, 0)
    assert not recovery.survived()


def test_a_poison_request_costs_the_others_nothing() -> None:
    recovery, rungs = policy()
    poison = Journal("a", tokens=[1, 2, 3])
    for _ in range(FATAL_DEATHS - 1):
        recovery.died(poison, death())
    with pytest.raises(PoisonError, match="3 tokens"):
        recovery.died(poison, death())
    assert (rungs.rung, rungs.lean) == (0, 0)


def test_a_suspect_killed_for_memory_gets_less_scratch_and_keeps_its_kernels() -> None:
    recovery, rungs = policy()
    suspect = Journal("a")
    recovery.died(suspect, death(-9))
    recovery.died(suspect, death(-9))
    assert (rungs.rung, rungs.lean) == (0, 2)


def test_deaths_without_end_are_given_up_and_slowed_down() -> None:
    recovery, _ = policy()
    waits = []

    def die_for_ever() -> None:
        for i in range(100):
            recovery.died(Journal(f"r{i}"), death())
            waits.append(recovery.backoff_seconds())

    with pytest.raises(EngineCrashError, match="in a row"):
        die_for_ever()
    assert waits == sorted(waits)
    assert waits[-1] == 10.0
    recovery.survived()
    assert recovery.died(Journal("later"), death())


def test_no_options_of_the_worker_exceed_what_was_asked(lab: Any) -> None:
    from edgellama.engine.verdicts import Verdicts
    from edgellama.runtime.ladder import Ladder, Start

    spec = ModelSpec.from_file(
        lab.script(), engine="fake", options=EngineOptions(micro_batch_tokens=16, batch_tokens=64, context_tokens=100)
    )
    ladder = Ladder(spec, spec.options, Verdicts(lab.folder), Start())
    ladder.go_plainest()
    assert (ladder.options.micro_batch_tokens, ladder.options.batch_tokens) == (16, 64)
