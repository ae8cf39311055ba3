"""`edgellama run` on a scripted Runtime: what goes to stdout, to stderr, and into the request."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from edgellama.errors import EngineLoadError
from edgellama.runtime.base import Done, Failed, Notice, PromptProgress, ReasoningDelta, TextDelta, Timings, Usage

Call = Callable[..., Any]


def test_stdout_holds_the_answer_and_nothing_else(scripted: Any, call: Call) -> None:
    scripted.answers.append(
        [
            PromptProgress(1, 3),
            Notice("restart", "the engine was restarted"),
            ReasoningDelta("hm"),
            TextDelta("Pa"),
            TextDelta("ris"),
            Done(finish_reason="stop", usage=Usage(), timings=Timings()),
        ]
    )
    result = call("run", "m", "--prompt", "capital?")
    assert result.code == 0
    assert result.out == "Paris\n"
    assert "the engine was restarted" in result.err
    assert "hm" not in result.err  # nobody looks at stderr here


def test_no_second_newline(scripted: Any, call: Call) -> None:
    scripted.say("line\n")
    assert call("run", "m", "--prompt", "x").out == "line\n"


def test_nothing_said_is_nothing_printed(scripted: Any, call: Call) -> None:
    scripted.say()
    result = call("run", "m", "--prompt", "x")
    assert (result.code, result.out) == (0, "")


def test_json_has_the_fields_of_the_contract(scripted: Any, call: Call) -> None:
    timings = Timings(prompt_tokens_per_second=10.0, generation_tokens_per_second=5.0, time_to_first_token_seconds=0.5)
    scripted.say("Pa", "ris", timings=timings)
    result = call("run", "m", "--json", "--prompt", "x")
    assert result.out.count("\n") == 1
    body = json.loads(result.out)
    assert body["text"] == "Paris"
    assert body["finish_reason"] == "stop"
    assert body["usage"]["prompt_tokens"] == 3
    assert body["usage"]["completion_tokens"] == 2
    assert body["timings"]["prompt_tokens_per_second"] == 10.0
    assert body["timings"]["generation_tokens_per_second"] == 5.0
    assert body["timings"]["time_to_first_token_seconds"] == 0.5
    assert result.err == ""


def test_quiet_says_nothing_beside(scripted: Any, call: Call) -> None:
    scripted.say("a")
    assert call("run", "m", "--prompt", "x", "--quiet").err == ""


def test_options_reach_the_request(scripted: Any, call: Call) -> None:
    scripted.say("a")
    words = ["--temperature", "0", "--top-k", "5", "--seed", "42", "--logit-bias", "7-1.5", "--ignore-eos"]
    words += ["--stop", "END", "--stop", "\n", "--max-tokens", "9", "--template-arg", "enable_thinking=false"]
    words += ["--template-arg", "date=today", "--system", "Be brief.", "--context-policy", "drop-oldest"]
    assert call("run", "m", "--prompt", "x", *words).code == 0
    request = scripted.requests[0]
    assert request.sampling.temperature == 0
    assert request.sampling.top_k == 5
    assert request.sampling.seed == 42
    assert request.sampling.logit_bias == {7: -1.5}
    assert request.sampling.ignore_eos is True
    assert request.sampling.top_p is None
    assert request.stop == ("END", "\n")
    assert request.max_tokens == 9
    assert request.template_arguments == {"enable_thinking": False, "date": "today"}
    assert request.context_policy == "drop-oldest"
    assert [(m.role, m.content) for m in request.messages] == [("system", "Be brief."), ("user", "x")]


def test_settings_fill_what_is_not_given(scripted: Any, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGELLAMA_SYSTEM", "From settings.")
    monkeypatch.setenv("EDGELLAMA_MAX_TOKENS", "7")
    scripted.say("a")
    call("run", "m", "--prompt", "x")
    assert scripted.requests[0].messages[0].content == "From settings."
    assert scripted.requests[0].max_tokens == 7
    call("run", "m", "--prompt", "x", "--system", "", "--max-tokens", "-1")
    assert scripted.requests[1].messages[0].content == ""
    assert scripted.requests[1].max_tokens is None


def test_raw_goes_without_a_template(scripted: Any, call: Call) -> None:
    scripted.say("a")
    call("run", "m", "--raw", "--prompt", "Once upon a time")
    assert scripted.requests[0].prompt == "Once upon a time"
    assert scripted.requests[0].messages == ()


@pytest.mark.parametrize(
    ("words", "stdin", "prompt"),
    [
        ([], "from a pipe\n", "from a pipe"),
        ([], "two\n\n", "two\n"),
        ([], "dos\r\n", "dos"),
        (["--prompt", "Summarize:"], "text\n", "Summarize:\n\ntext"),
        (["--prompt", "alone"], "", "alone"),
        ([], b"\xef\xbb\xbfmarked", "marked"),
        ([], "grün".encode("utf-16"), "grün"),
        ([], "nul \0 byte", "nul \0 byte"),
    ],
)
def test_prompt_sources(words: list[str], stdin: str | bytes, prompt: str, scripted: Any, call: Call) -> None:
    scripted.say("a")
    assert call("run", "m", *words, stdin=stdin).code == 0
    assert scripted.requests[0].messages[-1].content == prompt


@pytest.mark.parametrize(
    ("words", "stdin", "message"),
    [
        ([], "", "the prompt is empty"),
        (["--prompt", ""], "", "the prompt is empty"),
        ([], b"caf\xe9", "byte 3 is 0xe9"),
        (["--prompt", "x", "--temperature", "-1"], "", "--temperature is -1"),
        (["--prompt", "x", "--temperature", "nan"], "", "--temperature is nan"),
        (["--prompt", "x", "--top-p", "2"], "", "--top-p is 2"),
        (["--prompt", "x", "--max-tokens", "0"], "", "--max-tokens is 0"),
        (["--prompt", "x", "--stop", ""], "", "--stop is empty"),
        (["--prompt", "x", "--raw", "--system", "y"], "", "--raw uses no chat template"),
        (["--prompt", "x", "--template-arg", "novalue"], "", "expected NAME=VALUE"),
        (["--prompt", "x", "--logit-bias", "7"], "", "expected TOKEN+BIAS"),
        (["--prompt", "x", "--kv-type", "q7"], "", "q7"),
        (["--prompt", "x", "--ctx", "-5"], "", "context"),
        (["--prompt", "x", "--parallel", "0"], "", "parallel"),
        (["--prompt", "x", "--gpu-layers", "many"], "", "gpu_layers"),
        (["--prompt", "x", "--engine", "vllm"], "", "--engine is 'vllm'"),
        (["--prompt", "x", "--lora-scale", "1"], "", "--lora-scale is given 1 times"),
        (["--prompt", "x", "--context-policy", "guess"], "", "context_policy"),
    ],
)
def test_wrong_usage(words: list[str], stdin: str | bytes, message: str, scripted: Any, call: Call) -> None:
    scripted.say("a")
    result = call("run", "m", *words, stdin=stdin)
    assert result.code == 2
    assert result.out == ""
    assert message in result.err
    assert not scripted.requests


@pytest.mark.parametrize(
    "words",
    [
        ["--schema", "f.json"],
        ["--pace", "reading"],
        ["--rope-scaling", "yarn"],
        ["--rope-factor", "2"],
        ["--deterministic"],
        ["--profile", "cool"],
        ["--max-celsius", "80"],
        ["--idle-unload", "5"],
        ["--draft", "lookup"],
        ["--control-vector", "f"],
        ["--engine", "http://localhost:1"],
        ["--engine", "http://127.0.0.1:8080"],
        ["--context-policy", "shift"],
        ["--context-policy", "summarize"],
    ],
)
def test_options_of_later_versions_say_so(words: list[str], scripted: Any, call: Call) -> None:
    result = call("run", "m", "--prompt", "x", *words)
    assert result.code == 2
    assert result.out == ""
    assert "later version" in result.err
    assert words[0] in result.err


@pytest.mark.parametrize("words", [["--own"], ["--no-history"], ["--draft", "off"], ["--engine", "auto"]])
def test_options_that_ask_for_what_is_so_are_accepted(words: list[str], scripted: Any, call: Call) -> None:
    scripted.say("a")
    assert call("run", "m", "--prompt", "x", *words).code == 0


def test_a_failed_answer_keeps_its_text(scripted: Any, call: Call) -> None:
    end = Failed(kind="ContextOverflowError", message="the prompt has 9 tokens, the context holds 5", advice="shorten")
    scripted.answers = [[TextDelta("so far"), end]]
    result = call("run", "m", "--prompt", "x")
    assert result.code == 5
    assert result.out == "so far\n"
    assert "error: the prompt has 9 tokens" in result.err
    assert "shorten" in result.err


def test_a_failed_answer_in_json(scripted: Any, call: Call) -> None:
    scripted.answers = [[TextDelta("so far"), Failed(kind="EngineCrashError", message="died", advice="")]]
    result = call("run", "m", "--json", "--prompt", "x")
    assert result.code == 6
    body = json.loads(result.out)
    assert (body["text"], body["finish_reason"]) == ("so far", "error")
    assert json.loads(result.err)["error"]["kind"] == "EngineCrashError"


def test_a_start_that_fails(scripted: Any, call: Call) -> None:
    scripted.start_error = EngineLoadError("no library", "build it")
    result = call("run", "m", "--prompt", "x")
    assert (result.code, result.out) == (6, "")
    assert "no library" in result.err
    assert scripted.closed


def test_an_unforeseen_fault_is_told_without_a_traceback(scripted: Any, call: Call) -> None:
    scripted.answers = [[TextDelta("a"), ValueError("odd")]]
    result = call("run", "m", "--prompt", "x")
    assert result.code == 1
    assert result.out.startswith("a")
    assert "this is a defect in edgellama: ValueError: odd" in result.err
    assert "Traceback" not in result.err


def test_a_cut_answer_is_told(scripted: Any, call: Call) -> None:
    scripted.say("a", "b", finish_reason="length")
    assert "cut at --max-tokens 2" in call("run", "m", "--prompt", "x", "--max-tokens", "2").err
    assert "cut at the end of the context" in call("run", "m", "--prompt", "x", "--max-tokens", "5").err


def test_an_endless_standard_input_is_refused(scripted: Any, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    from edgellama.cli import prompt_input

    monkeypatch.setattr(prompt_input, "MAX_PROMPT_BYTES", 1000)
    result = call("run", "m", stdin="x" * 1001)
    assert result.code == 5
    assert "more than 1,000 bytes" in result.err
