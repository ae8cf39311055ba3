"""The step, with the fake engine: order, prefix reuse, restarts, cancels, broken numbers, full contexts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgellama.engine.base import Batch, EngineOptions
from edgellama.engine.fake import Fault, Script, write_script
from edgellama.engine.fake.engine import FakeEngine
from edgellama.errors import AbortedError
from edgellama.runtime.ends import EndTokens
from edgellama.runtime.messages import Finished, FromWorker, Generate, Prefilled, RequestFailed, Step
from edgellama.runtime.scheduler import Scheduler
from edgellama.sampling.options import SamplingOptions

GREEDY = SamplingOptions(temperature=0.0)


class Counting(FakeEngine):
    """Notes every batch."""

    batches: list[Batch]
    before: Callable[[Batch], None] | None = None
    keeps_tails = False

    def decode(self, batch: Batch) -> Any:
        self.__dict__.setdefault("batches", []).append(batch)
        if self.before is not None:
            self.before(batch)
        return super().decode(batch)

    def remove_sequence(self, sequence: int, start: int = 0, stop: int = -1) -> bool:
        if self.keeps_tails and start > 0:
            return False
        return super().remove_sequence(sequence, start, stop)


class Bench:
    """A scheduler on a fake engine, and what it said."""

    def __init__(self, folder: Path, options: EngineOptions | None = None, parallel: int = 1, **script: Any) -> None:
        options = options or EngineOptions()
        self.engine = Counting(str(write_script(folder / "m.fake.json", Script(**script))), options)
        self.said: list[FromWorker] = []
        ends = EndTokens(self.engine.tokenizer, self.engine.tokenizer.control_texts())
        self.scheduler = Scheduler(self.engine, options, self.said.append, ends, parallel=parallel)

    def run(self, *requests: Generate, steps: int = 10_000) -> None:
        for request in requests:
            self.scheduler.submit(request)
        for _ in range(steps):
            if self.scheduler.idle:
                return
            self.scheduler.step()
        assert steps < 10_000, "the scheduler does not come to an end"

    def of(self, kind: type[Any], request_id: str = "a") -> list[Any]:
        return [m for m in self.said if isinstance(m, kind) and m.request_id == request_id]

    def text(self, request_id: str = "a") -> str:
        return "".join(m.text for m in self.said if getattr(m, "request_id", "") == request_id and hasattr(m, "text"))

    def end(self, request_id: str = "a") -> Finished:
        (end,) = self.of(Finished, request_id)
        return end


def request(prompt: str = "Hi", request_id: str = "a", **fields: Any) -> Generate:
    fields.setdefault("sampling", GREEDY)
    fields.setdefault("max_tokens", 500)
    return Generate(request_id=request_id, prompt=tuple(prompt.encode()), **fields)


def test_an_answer_from_prompt_to_end(tmp_path: Path) -> None:
    bench = Bench(tmp_path, say="Grüße 😀!")
    bench.run(request())
    assert bench.text() == "Grüße 😀!"
    end = bench.end()
    assert (end.reason, end.prompt_tokens, end.cached_tokens) == ("stop", 2, 0)
    assert end.completion_tokens == len("Grüße 😀!".encode()) == len(bench.of(Step))
    assert not bench.of(RequestFailed)


def test_no_step_splits_a_character(tmp_path: Path) -> None:
    bench = Bench(tmp_path, say="aé😀漢")
    bench.run(request())
    assert [s.text for s in bench.of(Step)] == ["a", "", "é", "", "", "", "😀", "", "", "漢"]


def test_prompts_are_prefilled_in_chunks_with_progress(tmp_path: Path) -> None:
    bench = Bench(tmp_path, EngineOptions(batch_tokens=64, micro_batch_tokens=16), say="x")
    bench.run(request("p" * 50))
    assert [(m.done, m.total) for m in bench.of(Prefilled)] == [(0, 50), (16, 50), (32, 50), (48, 50), (50, 50)]
    assert [len(b) for b in bench.engine.batches] == [16, 16, 16, 2, 1]
    assert [int(b.want_logits.sum()) for b in bench.engine.batches] == [0, 0, 0, 1, 1]


def test_requests_run_one_after_the_other_in_order(tmp_path: Path) -> None:
    bench = Bench(tmp_path, say="ok")
    bench.run(request(request_id="a"), request(request_id="b"), request(request_id="c"))
    order = [m.request_id for m in bench.said if isinstance(m, Finished)]
    assert order == ["a", "b", "c"]
    first_of_b = next(i for i, m in enumerate(bench.said) if getattr(m, "request_id", "") == "b")
    assert isinstance(bench.said[first_of_b - 1], Finished)


def test_several_requests_at_once_give_the_same_texts(tmp_path: Path) -> None:
    alone = Bench(tmp_path)
    for name in "abc":
        alone.run(request(f"prompt {name}", name, max_tokens=20))
    options = EngineOptions(sequences=3, micro_batch_tokens=8)
    together = Bench(tmp_path, options, parallel=3)
    together.run(*(request(f"prompt {name}", name, max_tokens=20) for name in "abc"))
    assert any(len(set(b.sequences.tolist())) == 3 for b in together.engine.batches)
    for name in "abc":
        assert together.text(name) == alone.text(name)


# ---- where an answer ends


def test_max_tokens(tmp_path: Path) -> None:
    bench = Bench(tmp_path, say="abcdef")
    bench.run(request(max_tokens=3))
    assert (bench.text(), bench.end().reason, bench.end().completion_tokens) == ("abc", "length", 3)


def test_max_tokens_zero_computes_nothing(tmp_path: Path) -> None:
    bench = Bench(tmp_path, say="abcdef")
    bench.run(request(max_tokens=0))
    assert (bench.text(), bench.end().reason) == ("", "length")
    assert not hasattr(bench.engine, "batches")


@pytest.mark.parametrize("max_tokens", [4, 5])
def test_a_cut_character_or_stop_prefix_is_flushed(tmp_path: Path, max_tokens: int) -> None:
    bench = Bench(tmp_path, say="abc😀")
    bench.run(request(max_tokens=max_tokens, stop=("cX",)))
    assert bench.text() == "abc\ufffd"


def test_a_stop_string_over_several_tokens_is_never_shown(tmp_path: Path) -> None:
    bench = Bench(tmp_path, say="Hello User: bye")
    bench.run(request(stop=("User:", "nothing")))
    assert (bench.text(), bench.end().reason) == ("Hello ", "stop")


def test_a_full_context_ends_with_length(tmp_path: Path) -> None:
    bench = Bench(tmp_path, EngineOptions(context_tokens=20))
    bench.run(request("0123456789"))
    end = bench.end()
    assert (end.reason, end.prompt_tokens + end.completion_tokens) == ("length", 21)  # the last needs no cell
    assert not bench.of(RequestFailed)


@pytest.mark.parametrize(("length", "fits"), [(19, True), (20, True), (21, False)])
def test_a_prompt_must_fit(tmp_path: Path, length: int, fits: bool) -> None:
    bench = Bench(tmp_path, EngineOptions(context_tokens=20))
    bench.run(request("x" * length))
    if fits:
        assert bench.end().reason == "length"
    else:
        (failed,) = bench.of(RequestFailed)
        assert failed.kind == "ContextOverflowError"
        assert "21" in failed.message
        assert "20" in failed.message


def test_an_end_token_known_only_by_its_text(tmp_path: Path) -> None:
    names = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|eot_id|>")
    bench = Bench(tmp_path, control_tokens=names)
    end = 256 + names.index("<|eot_id|>")
    assert not bench.engine.tokenizer.is_end(end)
    bench.run(request(sampling=SamplingOptions(temperature=0.0, logit_bias={end: 100.0})))
    assert (bench.end().reason, bench.end().completion_tokens) == ("stop", 0)


def test_ignore_eos(tmp_path: Path) -> None:
    bench = Bench(tmp_path, say="ok")
    bench.run(request(max_tokens=30, sampling=SamplingOptions(temperature=0.0, ignore_eos=True)))
    assert (bench.end().reason, bench.end().completion_tokens) == ("length", 30)


# ---- prefix reuse


def test_the_next_turn_computes_only_what_is_new(tmp_path: Path) -> None:
    bench = Bench(tmp_path, say="answer")
    bench.run(request("system. first", "a"))
    bench.engine.batches.clear()
    bench.run(request("system. first" + "answer" + " second", "b"))
    assert bench.end("b").cached_tokens == len("system. firstanswer")
    assert len(bench.engine.batches[0]) == len(" second")
    assert int(bench.engine.batches[0].positions[0]) == len("system. firstanswer")


def test_the_same_prompt_again_computes_its_last_token(tmp_path: Path) -> None:
    bench = Bench(tmp_path, say="answer")
    bench.run(request("twice", "a"), request("twice", "b"))
    assert (bench.end("b").cached_tokens, bench.text("b")) == (4, "answer")


def test_a_different_prompt_keeps_only_the_common_beginning(tmp_path: Path) -> None:
    bench = Bench(tmp_path, say="answer")
    bench.run(request("abcdef", "a"), request("abcXY", "b"))
    assert (bench.end("b").cached_tokens, bench.text("b")) == (3, "answer")


def test_an_engine_that_cannot_drop_a_tail_starts_over(tmp_path: Path) -> None:
    bench = Bench(tmp_path, say="answer")
    bench.engine.keeps_tails = True
    bench.run(request("abcdef", "a"), request("abcXY", "b"))
    assert (bench.end("b").cached_tokens, bench.text("b")) == (0, "answer")


def test_two_conversations_keep_their_own_sequences(tmp_path: Path) -> None:
    bench = Bench(tmp_path, EngineOptions(sequences=2), say="ok")
    bench.run(request("first talk", "a"), request("second talk", "b"))
    bench.run(request("first talkok more", "c"), request("second talkok more", "d"))
    assert bench.end("c").cached_tokens == len("first talkok")
    assert bench.end("d").cached_tokens == len("second talkok")


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(prompts=st.lists(st.text("ab", min_size=1, max_size=12), min_size=1, max_size=6), sequences=st.integers(1, 3))
def test_reuse_never_changes_an_answer(tmp_path: Path, prompts: list[str], sequences: int) -> None:
    reusing = Bench(tmp_path, EngineOptions(sequences=sequences))
    for i, prompt in enumerate(prompts):
        reusing.run(request(prompt, str(i), max_tokens=6))
        fresh = Bench(tmp_path)
        fresh.run(request(prompt, max_tokens=6))
        assert reusing.text(str(i)) == fresh.text()


# ---- restarts


_SAY = "Zwölf Boxkämpfer 😀😀 jagen User Viktor quer über den großen Sylter Deich. END and more"
_SAMPLING = st.builds(
    SamplingOptions,
    temperature=st.sampled_from([0.0, 0.9]),
    seed=st.none() | st.integers(0, 2**64 - 1),
    repeat_penalty=st.sampled_from([1.0, 1.3]),
)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    cuts=st.lists(st.integers(0, 110), max_size=3),
    sampling=_SAMPLING,
    scripted=st.booleans(),
    stop=st.sampled_from([(), ("END",), ("User", "Deich. EX"), ("😀😀",)]),
    max_tokens=st.sampled_from([5, 40, 200]),
)
def test_a_restart_after_any_tokens_loses_and_repeats_nothing(
    tmp_path: Path, cuts: list[int], sampling: SamplingOptions, scripted: bool, stop: tuple[str, ...], max_tokens: int
) -> None:
    fields: dict[str, Any] = {"say": _SAY} if scripted else {}
    wanted = request(
        "Hello", sampling=sampling, stop=stop, max_tokens=min(max_tokens, 60) if not scripted else max_tokens
    )
    whole = Bench(tmp_path, **fields)
    whole.run(wanted)
    tokens = [step.token for step in whole.of(Step)]

    text, resume, state = "", [], b""
    for cut in [*sorted(cuts), None]:
        bench = Bench(tmp_path, **fields)  # a new process: nothing but the journal survives
        if state == b"" and sampling.seed is None and sampling.temperature:
            sampling = SamplingOptions(temperature=0.9, repeat_penalty=sampling.repeat_penalty, seed=whole.end().seed)
        again = Generate(
            request_id="a", prompt=wanted.prompt, resume=tuple(resume), state=state, sampling=sampling, stop=stop,
            max_tokens=wanted.max_tokens,
        )  # fmt: skip
        bench.scheduler.submit(again)
        while not bench.scheduler.idle and (cut is None or len(resume) + len(bench.of(Step)) < cut):
            bench.scheduler.step()
        for message in bench.said:
            if isinstance(message, Step):
                resume.append(message.token)
                state = message.state
                text += message.text
            elif isinstance(message, Finished):
                text += message.text
        if bench.of(Finished):
            break
    assert resume == tokens
    assert text == whole.text()
    assert bench.end().completion_tokens == len(tokens)
    assert bench.end().reason == whole.end().reason


def test_a_journal_that_was_already_complete_ends_at_once(tmp_path: Path) -> None:
    for fields, reason, text in (
        ({"max_tokens": 3}, "length", ""),
        ({"max_tokens": 50, "stop": ("c",)}, "stop", ""),
        ({"max_tokens": 3, "stop": ("cd",)}, "length", "c"),
    ):
        bench = Bench(tmp_path, say="abcdef")
        bench.run(request(resume=tuple(b"abc"), **fields))  # type: ignore[arg-type]
        assert (bench.end().reason, bench.text()) == (reason, text)
        assert not hasattr(bench.engine, "batches")


def test_a_resumed_answer_that_filled_the_context(tmp_path: Path) -> None:
    bench = Bench(tmp_path, EngineOptions(context_tokens=8), say="abcdefgh")
    bench.run(request("01234", resume=tuple(b"abcd")))
    assert bench.end().reason == "length"


# ---- cancel and abort


def test_cancel_of_a_waiting_request(tmp_path: Path) -> None:
    bench = Bench(tmp_path, say="ok")
    bench.scheduler.submit(request(request_id="a"))
    bench.scheduler.submit(request(request_id="b", resume=tuple("é".encode()[:1])))
    bench.scheduler.cancel("b")
    bench.run()
    assert bench.end("a").reason == "stop"
    assert (bench.end("b").reason, bench.end("b").text) == ("cancelled", "\ufffd")


def test_cancel_between_chunks(tmp_path: Path) -> None:
    bench = Bench(tmp_path, EngineOptions(batch_tokens=8))
    bench.scheduler.submit(request("x" * 100))
    bench.scheduler.step()
    bench.scheduler.step()
    bench.scheduler.cancel("a")
    bench.run()
    assert bench.end().reason == "cancelled"
    assert sum(map(len, bench.engine.batches)) == 16


def test_cancel_in_the_middle_of_a_decode(tmp_path: Path) -> None:
    bench = Bench(tmp_path, step_seconds=60.0, say="ok")
    bench.scheduler.submit(request())
    canceller = threading.Timer(0.2, bench.scheduler.cancel, ["a"])
    canceller.start()
    begun = time.monotonic()
    bench.run()
    canceller.join()
    assert bench.end().reason == "cancelled"
    assert time.monotonic() - begun < 30
    assert bench.engine.sequence_length(0) == 0


def test_a_cancel_that_came_just_before_the_decode_is_repeated(tmp_path: Path) -> None:
    bench = Bench(tmp_path, step_seconds=60.0, say="ok")
    bench.engine.before = lambda _: bench.scheduler.cancel("a")  # too early: the engine is not computing yet
    bench.scheduler.submit(request())
    beats = [threading.Timer(t, bench.scheduler.remind) for t in (0.2, 0.4)]
    for beat in beats:
        beat.start()
    bench.run()
    for beat in beats:
        beat.join()
    assert bench.end().reason == "cancelled"


def test_unknown_and_late_cancels_are_ignored(tmp_path: Path) -> None:
    bench = Bench(tmp_path, say="ok")
    bench.scheduler.cancel("never")
    bench.run(request())
    bench.scheduler.cancel("a")
    bench.run(request("again", "b"))
    assert [m.reason for m in bench.said if isinstance(m, Finished)] == ["stop", "stop"]


def test_an_abort_meant_for_nobody_changes_nothing(tmp_path: Path) -> None:
    bench = Bench(tmp_path, say="abcdef")
    strikes = iter([True, False, True, False])

    def abort(_: Batch) -> None:
        if next(strikes, False):
            raise AbortedError("the step was aborted")

    bench.engine.before = abort
    bench.run(request())
    assert (bench.text(), bench.end().reason) == ("abcdef", "stop")


def test_cancelling_one_of_two_leaves_the_other_alone(tmp_path: Path) -> None:
    bench = Bench(tmp_path, EngineOptions(sequences=2), parallel=2, step_seconds=0.3, say="ok!")
    bench.scheduler.submit(request("one", "a"))
    bench.scheduler.submit(request("three", "b"))
    threading.Timer(0.1, bench.scheduler.cancel, ["a"]).start()
    bench.run()
    assert bench.end("a").reason == "cancelled"
    assert (bench.text("b"), bench.end("b").reason) == ("ok!", "stop")


def test_the_watchdogs_abort_fails_the_request(tmp_path: Path) -> None:
    bench = Bench(tmp_path, step_seconds=60.0)
    bench.scheduler.interrupt()  # nothing is computed: no effect
    bench.scheduler.submit(request())
    threading.Timer(0.2, bench.scheduler.interrupt).start()
    bench.run()
    assert [m.kind for m in bench.of(RequestFailed)] == ["AbortedError"]


# ---- faults


def test_broken_numbers_end_one_request_and_the_next_is_fine(tmp_path: Path) -> None:
    bench = Bench(tmp_path, faults=(Fault(kind="nan", contains="poison"),))
    bench.run(request("poison", "a"), request("healthy", "b", max_tokens=4))
    (failed,) = bench.of(RequestFailed)
    assert failed.kind == "NumericError"
    assert "NaN" in failed.message
    assert bench.end("b").completion_tokens == 4


def test_broken_numbers_late_keep_the_text_and_empty_the_sequence(tmp_path: Path) -> None:
    bench = Bench(tmp_path, say="abé and more", faults=(Fault(kind="nan", phase="decode", step=3),))
    bench.run(request(stop=("bX",)))
    assert bench.text() == "ab\ufffd"
    assert [m.kind for m in bench.of(RequestFailed)] == ["NumericError"]
    assert bench.engine.sequence_length(0) == 0


def test_broken_numbers_of_one_do_not_touch_its_neighbour(tmp_path: Path) -> None:
    bench = Bench(
        tmp_path, EngineOptions(sequences=2), parallel=2, say="fine", faults=(Fault(kind="nan", contains="poison"),)
    )
    bench.run(request("poison", "a"), request("healthy", "b"))
    assert [m.kind for m in bench.of(RequestFailed, "a")] == ["NumericError"]
    assert bench.text("b") == "fine"


def test_an_engine_error_fails_the_request_by_its_class(tmp_path: Path) -> None:
    bench = Bench(tmp_path, say="ok", faults=(Fault(kind="error", phase="decode", step=1, message="boom"),))
    bench.run(request("x", "a"), request("x", "b"))
    assert [(m.kind, m.message) for m in bench.of(RequestFailed)] == [("EngineError", "boom")]
    assert bench.text("b") == "ok"
    assert bench.end("b").cached_tokens == 0


def test_a_full_cache_gives_up_what_earlier_requests_left(tmp_path: Path) -> None:
    options = EngineOptions(sequences=2)
    bench = Bench(tmp_path, options, say="ok", faults=(Fault(kind="overflow", phase="prefill", step=2),))
    bench.run(request("first", "a"), request("another", "b"))
    assert bench.text("b") == "ok"
    assert not bench.of(RequestFailed, "b")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prompt": ()}, "empty prompt"),
        ({"prompt": (1, 2, 9999)}, "9999"),
        ({"prompt": (1,), "resume": (-3,)}, "-3"),
        ({"prompt": (1,), "state": b"junk"}, "state"),
        ({"prompt": (1,), "sampling": SamplingOptions(logit_bias={70_000: 1.0})}, "70000"),
    ],
)
def test_impossible_requests_fail_alone(tmp_path: Path, fields: dict[str, Any], words: str) -> None:
    bench = Bench(tmp_path, say="ok")
    values: dict[str, Any] = {"sampling": GREEDY, "max_tokens": 5} | fields
    bench.run(Generate(request_id="a", **values), request(request_id="b"))
    (failed,) = bench.of(RequestFailed)
    assert failed.kind == "UsageError"
    assert words in failed.message
    assert bench.text("b") == "ok"


def test_forgetting_everything_computes_running_requests_again(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    whole = Bench(tmp_path)
    whole.run(request(max_tokens=12))
    bench.scheduler.submit(request(max_tokens=12))
    for _ in range(5):
        bench.scheduler.step()
    bench.scheduler.forget_all()
    bench.run()
    assert bench.text() == whole.text()
    assert np.array_equal([s.token for s in bench.of(Step)], [s.token for s in whole.of(Step)])


def test_control_tokens_that_mark_parts_are_shown_when_asked(tmp_path: Path) -> None:
    """Also by a request that a restart resumed after the mark: its text goes on behind it."""
    controls = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|channel|>")
    script = {"say": "<|channel|>thought", "control_tokens": controls}
    bench = Bench(tmp_path, **script)
    mark = bench.engine.tokenizer.tokenize("<|channel|>", special=True)
    assert len(mark) == 1
    bias = {mark[0]: 1000.0}
    first = SamplingOptions(temperature=0.0, logit_bias=bias)
    for name, show, text in (("a", (), ""), ("b", ("<|channel|>",), "<|channel|>")):
        bench.run(request(request_id=name, show=show, sampling=first, max_tokens=1))
        assert bench.text(name) == text
        assert bench.of(Step, name)[0].token == mark[0]
