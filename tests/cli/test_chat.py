"""The line chat on a scripted Runtime."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from edgellama.runtime.base import Done, Failed, Notice, ReasoningDelta, TextDelta, Timings, Usage

Call = Callable[..., Any]


def roles(request: Any) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in request.messages]


def test_a_conversation_grows_and_carries_its_tokens(scripted: Any, call: Call) -> None:
    scripted.say("Good ", "day.")
    scripted.say("Fine.")
    result = call("chat", "m", "--plain", "--system", "Be kind.", stdin="hello\nhow are you?\n")
    assert result.code == 0
    assert result.out == "Good day.\nFine.\n"
    assert roles(scripted.requests[1]) == [
        ("system", "Be kind."),
        ("user", "hello"),
        ("assistant", "Good day."),
        ("user", "how are you?"),
    ]
    assert scripted.requests[1].messages[2].tokens == (7, 8)


def test_reasoning_is_labelled_and_kept_apart(scripted: Any, call: Call) -> None:
    scripted.answers.append(
        [
            ReasoningDelta("Let me "),
            ReasoningDelta("think"),
            TextDelta("4"),
            Done(finish_reason="stop", usage=Usage(), timings=Timings()),
        ]
    )
    result = call("chat", "m", stdin="2+2?\n/retry\n")
    assert "Thinking: Let me think\n" in result.err
    assert result.out == "4\n4\n"
    assert "think" not in result.out


def test_a_notice_is_one_line(scripted: Any, call: Call) -> None:
    done = Done(finish_reason="stop", usage=Usage(), timings=Timings())
    scripted.answers.append([TextDelta("one"), Notice("restart", "the engine was restarted"), TextDelta("two"), done])
    result = call("chat", "m", stdin="x\n")
    assert result.out == "onetwo\n"
    assert "warning: the engine was restarted\n" in result.err


def test_overflow_offers_a_way_out_and_drop_takes_it(scripted: Any, call: Call) -> None:
    scripted.say("ok")
    scripted.answers.append(
        [Failed(kind="ContextOverflowError", message="the prompt has 900 tokens, the context holds 512")]
    )
    scripted.say("ok")
    result = call("chat", "m", stdin="short\nlong\n/drop\n")
    assert "the prompt has 900 tokens, the context holds 512" in result.err
    assert "/drop" in result.err
    assert "/clear" in result.err
    assert [request.context_policy for request in scripted.requests] == ["refuse", "refuse", "drop-oldest"]
    assert roles(scripted.requests[2])[-1] == ("user", "long")
    assert result.code == 5  # nobody watched the failure


def test_a_failed_answer_with_text_stays_in_the_conversation(scripted: Any, call: Call) -> None:
    scripted.answers = [[TextDelta("half"), Failed(kind="EngineCrashError", message="died twice")]]
    scripted.say("ok")
    result = call("chat", "m", stdin="a\nb\n")
    assert result.out.startswith("half\n")
    assert roles(scripted.requests[1]) == [("user", "a"), ("assistant", "half"), ("user", "b")]
    assert result.code == 6


def test_an_unanswered_message_does_not_break_the_alternation(scripted: Any, call: Call) -> None:
    scripted.say()
    scripted.say("ok")
    call("chat", "m", stdin="a\nb\n")
    assert roles(scripted.requests[1]) == [("user", "b")]


def test_retry_asks_the_same_again(scripted: Any, call: Call) -> None:
    scripted.say("one")
    call("chat", "m", stdin="a\n/retry\n")
    assert roles(scripted.requests[0]) == roles(scripted.requests[1]) == [("user", "a")]


def test_clear_and_system(scripted: Any, call: Call) -> None:
    scripted.say("one")
    call("chat", "m", stdin="a\n/clear\nb\n/system Be brief.\nc\n")
    assert roles(scripted.requests[1]) == [("user", "b")]
    assert roles(scripted.requests[2]) == [("system", "Be brief."), ("user", "c")]


def test_set_changes_the_next_request(scripted: Any, call: Call) -> None:
    scripted.say("one")
    words = "/set temperature 0\n/set top-k=5\n/set max_tokens 8\n/set template.enable_thinking false\na\n"
    result = call("chat", "m", stdin=words + "/set temperature\n/set\nb\n")
    first, second = scripted.requests
    assert (first.sampling.temperature, first.sampling.top_k, first.max_tokens) == (0, 5, 8)
    assert first.template_arguments == {"enable_thinking": False}
    assert second.sampling.temperature is None
    assert "top_k = 5\n" in result.err


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("/nonsense", "no command /nonsense"),
        ("/set temperature -3", "--temperature is -3"),
        ("/set temperature warm", "'warm' is not a number"),
        ("/set top_k 1.5", "whole numbers"),
        ("/set max_tokens 0", "1 or more"),
        ("/set colour red", "no option 'colour'"),
        ("/set context_policy shift", "refuse or drop-oldest"),
        ("/retry", "nothing to ask again"),
    ],
)
def test_wrong_commands_are_told_and_the_chat_goes_on(command: str, message: str, scripted: Any, call: Call) -> None:
    scripted.say("still here")
    result = call("chat", "m", stdin=f"{command}\nhi\n")
    assert message in result.err
    assert result.out == "still here\n"
    assert result.code == 2


def test_a_slash_can_be_sent(scripted: Any, call: Call) -> None:
    scripted.say("ok")
    call("chat", "m", stdin="//help\n\n   \n")
    assert [request.messages[-1].content for request in scripted.requests] == ["/help"]


@pytest.mark.parametrize("word", ["/exit", "/quit"])
def test_exit(word: str, scripted: Any, call: Call) -> None:
    scripted.say("ok")
    assert call("chat", "m", stdin=f"{word}\nnever read\n").code == 0
    assert not scripted.requests
    assert scripted.closed


def test_help_and_stats(scripted: Any, call: Call) -> None:
    scripted.say("ok")
    result = call("chat", "m", stdin="/help\na\n/stats\n/model\n")
    assert "/retry" in result.err
    assert "last answer: 3 prompt tokens, 1 answer tokens" in result.err
    assert "scripted (4,096 tokens of context)" in result.err
    assert result.out == "ok\n"


def test_a_line_that_is_no_text_is_told_and_the_chat_goes_on(scripted: Any, call: Call) -> None:
    scripted.say("ok")
    result = call("chat", "m", stdin=b"caf\xe9\nhi\n")
    assert "not valid text" in result.err
    assert len(scripted.requests) == 1


@pytest.mark.parametrize("words", [["--connect", "http://x"], ["--web"], ["--pace", "reading"]])
def test_options_of_later_versions_say_so(words: list[str], scripted: Any, call: Call) -> None:
    result = call("chat", "m", *words)
    assert result.code == 2
    assert "later version" in result.err


def test_a_notice_about_the_model_is_told_once(scripted: Any, call: Call) -> None:
    done = Done(finish_reason="stop", usage=Usage(), timings=Timings())
    notices = [Notice("template", "no template in the file"), Notice("worker-restarted", "restarted")]
    scripted.answers.append([*notices, TextDelta("a"), done])
    result = call("chat", "m", stdin="x\ny\n")
    assert result.err.count("no template in the file") == 1
    assert result.err.count("restarted") == 2


def test_over_a_pipe_only_answers_are_on_standard_output(scripted: Any, call: Call) -> None:
    scripted.say("cut ", "short", finish_reason="length")
    result = call("chat", "m", "-q", stdin="hello\n")
    assert (result.out, result.err) == ("cut short\n", "")
    assert "cut at the limit" in call("chat", "m", stdin="hello\n").err


def test_one_message_too_many_is_not_advised_to_drop_others(scripted: Any, call: Call) -> None:
    scripted.answers = [[Failed(kind="ContextOverflowError", message="the prompt is too long")]]
    assert "/drop" not in call("chat", "m", stdin="long\n").err
