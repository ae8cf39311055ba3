from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgellama.chat.messages import Message
from edgellama.engine.base import EngineOptions
from edgellama.engine.fake import Fault
from edgellama.errors import (
    ContextOverflowError,
    MemoryShortageError,
    NotFoundError,
    UnsupportedError,
    UsageError,
)
from edgellama.runtime.base import Done, GenerateRequest, Notice, PromptProgress, TextDelta
from edgellama.runtime.model import ModelSpec
from edgellama.runtime.supervisor import Worker
from edgellama.sampling.options import SamplingOptions

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{{ '<|im_start|>assistant\n' }}"
)


def turns(*contents: str) -> tuple[Message, ...]:
    roles = ("user", "assistant")
    return tuple(Message(role=roles[i % 2], content=text) for i, text in enumerate(contents))  # type: ignore[arg-type]


def make(text: str) -> GenerateRequest:
    return GenerateRequest(request_id="x", messages=turns(text))


# ---- one answer


async def test_an_answer_has_text_usage_timings_tokens_and_seed(lab: Any, ask: Any) -> None:
    host = await lab.host(say="Paris.", chat_template=CHATML)
    outcome = await ask(host, "Where?", sampling=SamplingOptions(seed=7))
    done = outcome.done
    prompt = "<|im_start|>user\nWhere?<|im_end|>\n<|im_start|>assistant\n"
    expected = len(prompt.replace("<|im_start|>", "1").replace("<|im_end|>", "1").encode())
    assert outcome.text == "Paris."
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (expected, 6)
    assert bytes(done.tokens) == b"Paris."
    assert done.seed == 7
    assert done.timings.prompt_tokens_per_second > 0
    assert done.timings.generation_tokens_per_second > 0
    assert 0 < done.timings.time_to_first_token_seconds <= done.timings.total_seconds
    assert done.timings.peak_memory_bytes > 1 << 20
    assert done.timings.temperature_celsius is None
    progress = [e for e in outcome.events if isinstance(e, PromptProgress)]
    assert progress[-1] == PromptProgress(expected, expected)


async def test_the_temperature_comes_from_whoever_reads_it(lab: Any, ask: Any) -> None:
    host = lab.make(lab.script(), read_temperature=lambda: 61.5)
    await host.start()
    assert (await ask(host)).done.timings.temperature_celsius == 61.5


async def test_a_drawn_seed_is_reported_and_repeats_the_answer(lab: Any, ask: Any) -> None:
    host = await lab.host(say=None)
    hot = SamplingOptions(temperature=2.0, top_k=0, min_p=0.0, top_p=1.0)
    first, second = await ask(host, max_tokens=20, sampling=hot), await ask(host, max_tokens=20, sampling=hot)
    assert first.text != second.text
    repeated = await ask(
        host,
        max_tokens=20,
        sampling=SamplingOptions(temperature=2.0, top_k=0, min_p=0.0, top_p=1.0, seed=first.done.seed),
    )
    assert repeated.text == first.text


async def test_reasoning_is_apart_from_the_answer(lab: Any, ask: Any) -> None:
    template = CHATML.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}")
    host = await lab.host(say="<think>\nhm, well\n</think>\n\nYes.", chat_template=template)
    outcome = await ask(host)
    assert (outcome.reasoning.strip(), outcome.text) == ("hm, well", "Yes.")


async def test_reasoning_marked_by_control_tokens_is_apart_too(lab: Any, ask: Any) -> None:
    """Their pieces are empty, so they must be shown to the splitter."""
    controls = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</think>")
    template = CHATML.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}")
    first = await lab.host(say=None, chat_template=template, control_tokens=controls)
    thinking, ended = await first.tokenize("<think>", special=True), await first.tokenize("</think>", special=True)
    assert len(thinking) == len(ended) == 1
    assert "<think>" in (await first._prompter.prompt(make("x"), first._keeper.present)).splitter.needs


async def test_an_answer_is_spliced_into_the_next_prompt(lab: Any, ask: Any) -> None:
    host = await lab.host(say="One two three.", chat_template=CHATML)
    first = await ask(host, "count")
    messages = (
        *turns("count"),
        Message(role="assistant", content=first.text, tokens=first.done.tokens),
        *turns("more"),
    )
    second = await ask(host, messages=messages)
    before = first.done.usage.prompt_tokens + first.done.usage.completion_tokens
    assert second.done.usage.cached_tokens >= before - 1


async def test_stop_strings_and_limits_end_an_answer(lab: Any, ask: Any) -> None:
    host = await lab.host(say="one, two, three")
    stopped = await ask(host, stop=("two",))
    assert (stopped.text, stopped.done.finish_reason) == ("one, ", "stop")
    cut = await ask(host, max_tokens=3)
    assert (cut.text, cut.done.finish_reason, len(cut.done.tokens)) == ("one", "length", 3)
    none = await ask(host, max_tokens=0)
    assert (none.text, none.done.finish_reason) == ("", "length")
    assert none.done.usage.prompt_tokens > 0


async def test_without_a_limit_an_answer_ends_with_the_context(lab: Any, ask: Any) -> None:
    host = await lab.host(say=None, options=EngineOptions(context_tokens=64))
    done = (await ask(host, prompt="x" * 40)).done
    assert done.finish_reason == "length"
    assert 63 <= done.usage.prompt_tokens + done.usage.completion_tokens <= 65


async def test_raw_prompts_and_tokens_pass_without_a_template(lab: Any, ask: Any) -> None:
    host = await lab.host(say="ok", adds_bos=True)
    assert (await ask(host, prompt="abc")).done.usage.prompt_tokens == 4  # with the beginning token
    assert (await ask(host, tokens=(97, 98, 99))).done.usage.prompt_tokens == 3


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"messages": ()}, "UsageError"),
        ({"prompt": "a", "tokens": (1,)}, "UsageError"),
        ({"prompt": ""}, "UsageError"),
        ({"tokens": ()}, "UsageError"),
        ({"tokens": (-1,)}, "UsageError"),
        ({"tokens": (1 << 40,)}, "UsageError"),
        ({"max_tokens": -1}, "UsageError"),
        ({"context_policy": "summarize"}, "UnsupportedError"),
        ({"template_arguments": {"messages": 1}}, "UsageError"),
    ],
)
async def test_what_cannot_be_meant_fails_with_its_kind(lab: Any, ask: Any, fields: dict[str, Any], kind: str) -> None:
    host = await lab.host()
    assert (await ask(host, **fields)).failed.kind == kind
    assert (await ask(host)).done


async def test_a_template_that_refuses_fails_the_request(lab: Any, ask: Any) -> None:
    host = await lab.host(chat_template="{{ raise_exception('only on Sundays') }}")
    failed = (await ask(host)).failed
    assert failed.kind == "TemplateError"
    assert "only on Sundays" in failed.message


async def test_a_missing_template_is_told_once_per_answer(lab: Any, ask: Any) -> None:
    host = await lab.host(chat_template="")
    assert "no chat template" in (await ask(host)).notices("template")[0]


# ---- context


async def test_a_prompt_that_does_not_fit_is_refused_with_both_sizes(lab: Any, ask: Any) -> None:
    host = await lab.host(options=EngineOptions(context_tokens=64))
    failed = (await ask(host, "x" * 100)).failed
    assert failed.kind == ContextOverflowError.__name__
    assert "101 tokens" in failed.message  # the template adds one
    assert "64" in failed.message
    assert "--ctx" in failed.advice


async def test_oldest_turns_are_dropped_only_when_asked_and_said_so(lab: Any, ask: Any) -> None:
    host = await lab.host(options=EngineOptions(context_tokens=128), chat_template=CHATML, say="ok")
    system = Message(role="system", content="be brief")
    conversation = (system, *turns("a" * 40, "b" * 40, "c" * 10, "d" * 10, "last"))
    assert (await ask(host, messages=conversation)).failed.kind == ContextOverflowError.__name__
    outcome = await ask(host, messages=conversation, context_policy="drop-oldest", max_tokens=8)
    assert outcome.done.usage.dropped_messages == 2
    (notice,) = outcome.notices("messages-dropped")
    assert "2 messages" in notice
    assert outcome.done.usage.prompt_tokens <= 120


async def test_a_last_turn_that_is_too_long_alone_is_refused(lab: Any, ask: Any) -> None:
    host = await lab.host(options=EngineOptions(context_tokens=64))
    outcome = await ask(host, messages=turns("a", "b", "x" * 200), context_policy="drop-oldest")
    assert outcome.failed.kind == ContextOverflowError.__name__


# ---- the queue


async def test_requests_are_served_in_order_and_know_their_place(lab: Any, ask: Any, make_request: Any) -> None:
    host = await lab.host(step_seconds=0.01, say="a few words")
    order: list[str] = []
    requests = [make_request(request_id=f"q{i}") for i in range(4)]

    async def run(i: int) -> list[str]:
        notices = []
        async for event in host.generate(requests[i]):
            if isinstance(event, Notice) and event.kind == "queued":
                notices.append(event.text)
            if isinstance(event, Done):
                order.append(requests[i].request_id)
        return notices

    tasks = [asyncio.create_task(run(i)) for i in range(4)]
    while host.position("q3") is None:
        await asyncio.sleep(0)
    assert [host.position(f"q{i}") for i in range(4)] == [0, 1, 2, 3]
    while (await host.status()).queued == 4:
        await asyncio.sleep(0)
    assert (await host.status()).queued == 3
    assert [host.position(f"q{i}") for i in range(4)] == [0, 1, 2, 3]
    notices = await asyncio.gather(*tasks)
    assert order == ["q0", "q1", "q2", "q3"]
    assert [len(n) for n in notices] == [0, 1, 1, 1]
    assert "3 requests are ahead" in notices[3][0]
    assert host.position("q0") is None


async def test_a_full_queue_refuses_at_once(lab: Any, ask: Any) -> None:
    host = lab.make(lab.script(step_seconds=0.01, say="a few words"), queue_limit=1)
    await host.start()
    first = asyncio.create_task(ask(host))
    await asyncio.sleep(0.1)
    second = asyncio.create_task(ask(host))
    await asyncio.sleep(0)
    assert (await ask(host)).failed.kind == "BusyError"
    assert (await first).done
    assert (await second).done


async def test_an_id_in_use_is_refused(lab: Any, ask: Any) -> None:
    host = await lab.host(step_seconds=0.01, say="a few words")
    first = asyncio.create_task(ask(host, request_id="same"))
    await asyncio.sleep(0.05)
    assert (await ask(host, request_id="same")).failed.kind == "UsageError"
    assert (await first).done
    assert (await ask(host, request_id="same")).done


async def test_cancelling_ends_running_and_waiting_requests(lab: Any, ask: Any) -> None:
    host = await lab.host(say=None, step_seconds=0.01)
    running = asyncio.create_task(ask(host, request_id="running"))
    waiting = asyncio.create_task(ask(host, request_id="waiting"))
    await asyncio.sleep(0.3)
    await host.cancel("waiting")
    await host.cancel("running")
    await host.cancel("unknown")
    first, second = await running, await waiting
    assert first.done.finish_reason == second.done.finish_reason == "cancelled"
    assert len(first.done.tokens) >= len(first.text) > 0
    assert second.text == ""
    assert (await ask(host, max_tokens=5)).done.finish_reason == "length"


async def test_a_cancelled_step_does_not_hold_up_the_next_request(lab: Any, ask: Any) -> None:
    host = await lab.host(Fault(kind="slow", phase="prefill", contains="slow", seconds=20.0))
    slow = asyncio.create_task(ask(host, "slow", request_id="slow"))
    await asyncio.sleep(0.3)
    await host.cancel("slow")
    assert (await slow).done.finish_reason == "cancelled"
    async with asyncio.timeout(10):
        assert (await ask(host)).done.finish_reason == "stop"


async def test_closing_the_iterator_cancels(lab: Any, ask: Any, make_request: Any) -> None:
    host = await lab.host(say=None, step_seconds=0.01)
    events = host.generate(make_request())
    async for event in events:
        if isinstance(event, TextDelta):
            break
    await events.aclose()
    assert (await host.status()).models[0].requests <= 1  # the worker may still be in its step
    assert (await ask(host, max_tokens=5)).done.finish_reason == "length"


async def test_a_deadline_ends_an_answer_and_says_so(lab: Any, ask: Any) -> None:
    host = lab.make(lab.script(say=None, step_seconds=0.02), request_seconds=0.4)
    await host.start()
    outcome = await ask(host)
    assert outcome.done.finish_reason == "cancelled"
    assert outcome.text
    assert len(outcome.notices("deadline")) == 1


async def test_closing_the_host_ends_every_answer(lab: Any, ask: Any) -> None:
    host = await lab.host(say=None, step_seconds=0.01)
    tasks = [asyncio.create_task(ask(host)) for _ in range(3)]
    await asyncio.sleep(0.2)
    await host.close()
    for outcome in await asyncio.gather(*tasks):
        assert outcome.done.finish_reason == "cancelled"
    assert (await ask(host)).failed.kind == "UsageError"
    await host.close()


async def test_two_hosts_live_side_by_side(lab: Any, ask: Any) -> None:
    one, two = lab.make(lab.script(say="one", name="a")), lab.make(lab.script(say="two", name="b"))
    await asyncio.gather(one.start(), two.start())
    outcomes = await asyncio.gather(ask(one), ask(two))
    assert [o.text for o in outcomes] == ["one", "two"]


# ---- calls beside the queue


async def test_counting_and_tokenizing_do_not_wait_for_an_answer(lab: Any, ask: Any, make_request: Any) -> None:
    host = await lab.host(Fault(kind="slow", phase="prefill", contains="slow", seconds=5.0), chat_template=CHATML)
    slow = asyncio.create_task(ask(host, "slow", request_id="slow"))
    await asyncio.sleep(0.2)
    async with asyncio.timeout(3):
        assert await host.tokenize("abc") == [97, 98, 99]
        assert await host.tokenize("<s>", special=True) == [256]
        assert await host.count(make_request("hello")) == len("1user\nhello1\n1assistant\n")
    await host.cancel("slow")
    await slow


async def test_embeddings_are_unit_vectors_and_refused_without(lab: Any) -> None:
    plain = await lab.host(name="plain")
    assert not plain.capabilities.embeddings
    with pytest.raises(UnsupportedError):
        await plain.embed(["a"])
    host = lab.make(lab.script(), EngineOptions(embeddings=True))
    await host.start()
    assert host.capabilities.embeddings
    vectors = np.asarray(await host.embed(["a", "b", "a"]))
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-5)
    np.testing.assert_array_equal(vectors[0], vectors[2])
    assert not np.allclose(vectors[0], vectors[1])
    assert await host.embed([]) == []


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
async def test_a_worker_that_died_while_idle_is_replaced(lab: Any, ask: Any) -> None:
    host = await lab.host()
    pid = (await host.status()).models[0].worker_pid
    os.kill(pid, signal.SIGKILL)
    await asyncio.sleep(0.2)
    assert (await host.status()).models[0].worker_pid is None
    assert await host.tokenize("a") == [97]
    outcome = await ask(host)
    assert outcome.done.finish_reason == "stop"
    assert "while nothing ran" in outcome.notices("worker-restarted")[0]


# ---- starting


async def test_the_process_starts_before_the_file_is_read(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    spawn = Worker.spawn

    async def spy(*args: Any, **fields: Any) -> Worker:
        order.append("spawn")
        return await spawn(*args, **fields)

    def spec() -> ModelSpec:
        time.sleep(0.05)
        order.append("read")
        return ModelSpec.from_file(script, engine="fake")

    monkeypatch.setattr(Worker, "spawn", spy)
    script = lab.script()
    host = lab.make(script)
    host._make_spec = spec
    await host.start()
    assert order == ["spawn", "read"]


async def test_a_bad_file_leaves_no_process(lab: Any) -> None:
    host = lab.make(lab.script())

    def missing() -> ModelSpec:
        return ModelSpec.from_file(lab.folder / "none.gguf")

    host._make_spec = missing
    with pytest.raises(NotFoundError):
        await host.start()
    with pytest.raises(UsageError):
        await host.tokenize("a")


async def test_a_start_that_is_given_up_leaves_no_process(lab: Any) -> None:
    host = lab.make(lab.script(load_seconds=5.0))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.6):
            await host.start()


async def test_loading_reports_its_progress(lab: Any) -> None:
    fractions: list[float] = []
    host = lab.make(lab.script(), on_load_progress=fractions.append)
    await host.start()
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0


async def test_a_model_that_does_not_fit_is_refused_before_loading(lab: Any) -> None:
    host = lab.make(lab.script(size_bytes=10 << 30), available_bytes=lambda: 1 << 30)
    with pytest.raises(MemoryShortageError, match="10,240"):
        await host.start()


def test_importing_the_host_loads_no_engine() -> None:
    heavy = {"numba", "llama_cpp", "textual", "fastapi", "jinja2"}
    code = (
        f"import sys, edgellama.runtime.host; found = {heavy} & set(sys.modules); sys.exit(repr(found) if found else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# ---- the real engine


@pytest.mark.model
@pytest.mark.llamacpp
async def test_a_killed_worker_of_the_real_engine_changes_nothing(
    default_model_path: Path, ask: Any, tmp_path: Path
) -> None:
    from edgellama.runtime.host import Host
    from edgellama.runtime.ladder import Start

    spec = ModelSpec.from_file(default_model_path, options=EngineOptions(context_tokens=512, threads=1))
    greedy = SamplingOptions(temperature=0.0)
    async with Host(spec, start=Start(probe_seconds=0.0), cache_folder=tmp_path) as host:
        question = "Count from one to twenty in words."
        undisturbed = await ask(host, question, sampling=greedy, max_tokens=24)
        pid = (await host.status()).models[0].worker_pid
        disturbed = await ask(
            host, question, sampling=greedy, max_tokens=24, on_text=lambda n: n == 8 and os.kill(pid, signal.SIGKILL)
        )
    assert len(disturbed.notices("worker-restarted")) == 1
    assert disturbed.text == undisturbed.text
    assert disturbed.done.tokens == undisturbed.done.tokens
