"""Faults x outcomes, with real worker processes: text never lost or repeated, one end, one notice, no orphans."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgellama.engine.base import EngineOptions
from edgellama.engine.fake import Fault
from edgellama.errors import EngineCrashError, EngineLoadError, MemoryShortageError, NumericError
from edgellama.sampling.options import SamplingOptions

# The probe makes 4 single steps and the answer goes on from there: step 20 is in the middle of it.
MIDDLE = {"phase": "decode", "step": 20, "times": 1}
PREFILL = {"phase": "prefill", "contains": "hello", "times": 1}
CRASHES = ["SIGILL", "SIGSEGV", "SIGBUS", "SIGFPE", "SIGABRT", "SIGKILL"]

posix = pytest.mark.skipif(sys.platform == "win32", reason="signals")


def fault(kind: Any, place: dict[str, Any], **fields: Any) -> Fault:
    return Fault(kind=kind, **place, **fields)


SURVIVED = [
    *(pytest.param(fault("signal", MIDDLE, signal=name), name, id=f"{name}-decode", marks=posix) for name in CRASHES),
    *(
        pytest.param(fault("signal", PREFILL, signal=name), name, id=f"{name}-prefill", marks=posix)
        for name in ("SIGILL", "SIGSEGV", "SIGKILL")
    ),
    pytest.param(fault("exit", MIDDLE, code=9), "exit code 9", id="exit"),
    pytest.param(fault("exit", MIDDLE, code=0), "ended", id="exit-0"),
    pytest.param(fault("hang", MIDDLE), "no progress", id="hang"),
    pytest.param(fault("hang", MIDDLE, heeds_abort=True), "no progress", id="hang-that-heeds-abort"),
    pytest.param(fault("hang", PREFILL), "no progress", id="hang-prefill"),
    pytest.param(fault("freeze", MIDDLE), "was killed", id="freeze"),
]


@pytest.mark.parametrize(("fault", "words"), SURVIVED)
async def test_the_answer_goes_on_once(lab: Any, ask: Any, fault: Fault, words: str) -> None:
    from_prompt = fault.phase == "prefill"
    host = await lab.host(fault)
    outcome = await ask(host, "hello")
    undisturbed = json.loads((lab.folder / "model.fake.json").read_bytes())["say"]
    assert outcome.text == undisturbed
    assert outcome.done.finish_reason == "stop"
    assert bytes(outcome.done.tokens).decode() == undisturbed
    (notice,) = outcome.notices("worker-restarted")
    assert words in notice
    assert "goes on" in notice
    # Where trying again is useless, settings change, and the notice says so.
    assert ("weight repacking off" in notice) == (words == "SIGILL"), from_prompt
    again = await ask(host, "and again")
    assert again.text == undisturbed
    assert not again.notices("worker-restarted")


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        pytest.param({"advancing": True, "seconds": 1.5}, "hang", id="advancing"),
        pytest.param({"seconds": 1.5}, "slow", id="slow"),
    ],
)
async def test_a_slow_board_is_no_hang(lab: Any, ask: Any, fields: dict[str, Any], place: str) -> None:
    outcome = await ask(await lab.host(fault(place, MIDDLE, **fields)))
    assert outcome.done.finish_reason == "stop"
    assert not outcome.notices("worker-restarted")


async def test_numbers_that_are_none_fail_the_request_and_no_other(lab: Any, ask: Any) -> None:
    host = await lab.host(Fault(kind="nan", phase="decode", contains="poisoned", position=30))
    failed = await ask(host, "poisoned")
    assert failed.failed.kind == "NumericError"
    assert failed.text  # what was good is kept
    assert (await ask(host, "healthy")).done.finish_reason == "stop"


async def test_a_request_that_always_kills_is_given_up_and_others_go_on(lab: Any, ask: Any) -> None:
    host = await lab.host(Fault(kind="signal", contains="killer", position=30, signal="SIGSEGV"))
    before = (await host.status()).models[0].settings
    killer, other = await asyncio.gather(ask(host, "killer"), ask(host, "other"))
    assert killer.failed.kind == "PoisonError"
    said = json.loads((lab.folder / "model.fake.json").read_bytes())["say"].encode()
    assert said[: killer.failed.usage.completion_tokens].decode(errors="ignore") == killer.text != ""
    assert other.done.finish_reason == "stop"
    assert (await host.status()).models[0].settings == before
    assert (await ask(host, "later")).done.finish_reason == "stop"


async def test_a_prompt_that_kills_the_tokenizing_worker_is_given_up(lab: Any, ask: Any) -> None:
    host = await lab.host(Fault(kind="signal", phase="prefill", contains="killer", signal="SIGKILL"))
    killer, other = await asyncio.gather(ask(host, "killer"), ask(host, "other"))
    assert killer.failed.kind == "PoisonError"
    assert other.done.finish_reason == "stop"


@posix
async def test_a_fault_of_the_settings_is_survived_at_plainer_ones(lab: Any, ask: Any) -> None:
    """It dies at every step 20 unless flash attention is off: two rungs down."""
    where = {"phase": "decode", "position": 30, "unless": {"flash_attention": ("off",)}}
    host = await lab.host(fault("signal", where, signal="SIGSEGV"))
    outcome = await ask(host)
    assert outcome.done.finish_reason == "stop"
    assert outcome.text == json.loads((lab.folder / "model.fake.json").read_bytes())["say"]


# ---- before serving


@posix
async def test_the_ladder_finds_the_setting_that_kills(lab: Any, ask: Any) -> None:
    """What the AMX path does on some machines: any decode dies while weights may be repacked."""
    script = lab.script(Fault(kind="signal", signal="SIGILL", when={"repack_weights": (True,)}))
    host = lab.make(script)
    await host.start()
    outcome = await ask(host)
    assert outcome.done.finish_reason == "stop"
    (notice,) = outcome.notices("engine-settings")
    assert "SIGILL" in notice
    assert "weight repacking off" in notice
    assert (await host.status()).models[0].settings == "weight repacking off"
    await host.close()
    again = lab.make(script)
    await again.start()
    assert (await again.status()).models[0].settings == "weight repacking off"
    assert not (await ask(again)).notices("engine-settings")


@pytest.mark.parametrize("kind", ["nan", "wrong"])
async def test_the_ladder_finds_the_setting_whose_numbers_are_wrong(lab: Any, ask: Any, kind: Any) -> None:
    script = lab.script(Fault(kind=kind, scale=8.0, unless={"flash_attention": ("off",)}), say=None)
    host = lab.make(script, probe_seconds=10.0)
    await host.start()
    assert (await host.status()).models[0].settings == "weight repacking off, flash attention off"
    outcome = await ask(host, max_tokens=4)
    assert len(outcome.notices("engine-settings")) == 2


@pytest.mark.parametrize("probe_seconds", [0.0, 10.0])
async def test_numbers_wrong_at_every_setting_are_refused(lab: Any, probe_seconds: float) -> None:
    host = lab.make(lab.script(Fault(kind="nan")), probe_seconds=probe_seconds)
    with pytest.raises(NumericError, match="not finite"):
        await host.start()


@posix
async def test_a_model_that_dies_on_every_rung_is_refused_with_the_rungs(lab: Any) -> None:
    host = lab.make(lab.script(Fault(kind="signal", phase="load", signal="SIGILL")))
    with pytest.raises(EngineCrashError, match=r"as asked.*repacking.*flash attention.*CPU only"):
        await host.start()


async def test_a_load_that_fails_is_refused_with_its_reason(lab: Any) -> None:
    host = lab.make(lab.script(Fault(kind="error", phase="load", message="no such tensor")))
    with pytest.raises(EngineLoadError, match="no such tensor"):
        await host.start()


async def test_a_load_that_fails_only_at_some_settings_steps_down(lab: Any, ask: Any) -> None:
    host = await lab.host(Fault(kind="error", phase="load", when={"flash_attention": ("auto",)}))
    assert "flash attention off" in (await host.status()).models[0].settings
    assert (await ask(host)).done


@posix
async def test_a_load_killed_once_is_repeated_at_the_same_settings(lab: Any, ask: Any) -> None:
    host = lab.make(lab.script(Fault(kind="signal", phase="load", signal="SIGKILL", times=1)))
    await host.start()
    assert (await host.status()).models[0].settings == ""
    assert "SIGKILL" in (await ask(host)).notices("engine-settings")[0]


@posix
async def test_a_load_killed_for_memory_gets_by_with_less(lab: Any) -> None:
    kill = Fault(kind="signal", phase="load", signal="SIGKILL", when={"micro_batch_tokens": (512,)})
    host = lab.make(lab.script(kill))
    await host.start()
    assert (await host.status()).models[0].settings == "micro batch 128"


@posix
async def test_a_load_killed_again_and_again_gets_by_with_a_shorter_context(lab: Any, ask: Any) -> None:
    kill = Fault(kind="signal", phase="load", signal="SIGKILL", when={"context_tokens": (4096, 2048)})
    host = lab.make(lab.script(kill))
    await host.start()
    assert (await host.status()).models[0].context_tokens == 1024
    assert "context 1024" in (await ask(host)).notices("engine-settings")[-1]
    asked = lab.make(lab.script(kill, name="asked"), EngineOptions(context_tokens=4096))
    with pytest.raises(MemoryShortageError):
        await asked.start()


@posix
async def test_a_load_always_killed_is_a_lack_of_memory(lab: Any) -> None:
    host = lab.make(lab.script(Fault(kind="signal", phase="load", signal="SIGKILL")))
    with pytest.raises(MemoryShortageError, match="SIGKILL"):
        await host.start()


async def test_a_load_that_hangs_is_ended(lab: Any) -> None:
    host = lab.make(lab.script(Fault(kind="hang", phase="load", when={"repack_weights": (True,)})))
    await host.start()
    assert (await host.status()).models[0].settings == "weight repacking off"


async def test_a_worker_that_never_says_hello_is_refused(lab: Any) -> None:
    from edgellama.runtime.watchdog import Limits

    command = [sys.executable, str(Path(__file__).with_name("stand_in.py")), "sleep"]
    host = lab.make(
        lab.script(),
        EngineOptions(gpu_layers=0, flash_attention="off", repack_weights=False),
        command=command,
        limits=Limits(hello=0.5, shutdown=0.2),
    )
    with pytest.raises(EngineCrashError, match="no progress"):
        await host.start()


async def test_garbage_on_the_pipe_is_a_dead_worker(lab: Any) -> None:
    command = [sys.executable, str(Path(__file__).with_name("stand_in.py")), "noise"]
    options = EngineOptions(gpu_layers=0, flash_attention="off", repack_weights=False)
    host = lab.make(lab.script(), options, command=command)
    with pytest.raises(EngineCrashError, match="garbage"):
        await host.start()


async def test_garbage_in_the_middle_of_an_answer_is_survived(lab: Any, ask: Any) -> None:
    script = str(Path(__file__).with_name("stand_in.py"))
    host = lab.make(lab.script(), command=[sys.executable, script, "garble", str(lab.folder / "done")])
    await host.start()
    outcome = await ask(host, max_tokens=5)
    assert outcome.text == "0 1 2 3 4 "
    assert "sent garbage" in outcome.notices("worker-restarted")[0]
    assert outcome.done.tokens == (0, 1, 2, 3, 4)


async def test_more_tokens_than_asked_for_are_a_fault(lab: Any, ask: Any) -> None:
    host = lab.make(lab.script(), command=[sys.executable, str(Path(__file__).with_name("stand_in.py"))])
    await host.start()
    outcome = await ask(host, max_tokens=3)
    assert outcome.text == "0 1 2 "
    assert outcome.failed.kind == "PoisonError"
    assert "more than the 3 tokens" in outcome.failed.message


# ---- the host itself


@posix
def test_no_worker_outlives_a_killed_host(tmp_path: Path) -> None:
    from edgellama.engine.fake import Script, write_script

    script = write_script(tmp_path / "m.fake.json", Script(step_seconds=0.05))
    program = f"""
import asyncio, pathlib
from edgellama.runtime.base import GenerateRequest
from edgellama.runtime.host import Host
from edgellama.runtime.model import ModelSpec
async def main():
    host = Host(ModelSpec.from_file({str(script)!r}, engine="fake"), cache_folder=pathlib.Path({str(tmp_path)!r}))
    await host.start()
    print((await host.status()).models[0].worker_pid, flush=True)
    async for event in host.generate(GenerateRequest(request_id="a", prompt="x")): pass
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as host:
        assert host.stdout is not None
        worker = psutil.Process(int(host.stdout.readline()))
        time.sleep(0.3)
        host.send_signal(signal.SIGKILL)
        host.wait()
        _gone, alive = psutil.wait_procs([worker], timeout=5)
    assert not alive


@posix
@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kills=st.lists(st.floats(0.0, 0.6), min_size=1, max_size=2), seed=st.integers(0, 2**32 - 1))
def test_any_schedule_of_kills_leaves_the_text_whole(
    make_lab: Any, ask: Any, tmp_path: Path, kills: list[float], seed: int
) -> None:
    """Sampled at a high temperature, so that text and sampler state both have to survive."""

    async def run(moments: list[float]) -> tuple[str, tuple[int, ...], int]:
        host = made.make(script)
        async with host:
            answer = asyncio.create_task(ask(host, max_tokens=60, sampling=sampling))
            for moment in moments:
                await asyncio.sleep(moment)
                pid = (await host.status()).models[0].worker_pid
                if pid is not None and not answer.done():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            outcome = await answer
            restarts = (await host.status()).models[0].restarts
        assert len(outcome.notices("worker-restarted")) <= restarts <= len(moments)
        return outcome.text, outcome.done.tokens, restarts

    made = make_lab(tmp_path)
    script = made.script(say=None, step_seconds=0.005)
    sampling = SamplingOptions(temperature=1.5, top_k=0, top_p=1.0, min_p=0.0, seed=seed)
    undisturbed = asyncio.run(run([]))
    assert asyncio.run(run(kills))[:2] == undisturbed[:2]
