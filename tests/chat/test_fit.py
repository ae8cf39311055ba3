"""Fitting by whole turns, with a counter that is independent of the search."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgellama.chat import fit
from edgellama.chat.messages import Message
from edgellama.errors import ContextOverflowError


def count(messages: Sequence[Message]) -> int:
    return sum(len(message.content) + 3 for message in messages)


def said(role: str, content: str) -> Message:
    return Message(role=role, content=content)  # type: ignore[arg-type]


TALK = (
    said("system", "S" * 10),
    said("user", "a" * 20),
    said("assistant", "b" * 20),
    said("user", "c" * 5),
    said("assistant", ""),
    said("tool", "d" * 7),
    said("assistant", "e" * 3),
    said("user", "f" * 2),
)


def test_what_fits_stays_as_it_is() -> None:
    for policy in ("refuse", "drop-oldest"):
        assert fit.fit(TALK, count(TALK), count, policy) == (TALK, count(TALK), 0)  # type: ignore[arg-type]


def test_refuse_tells_both_sizes() -> None:
    with pytest.raises(ContextOverflowError) as caught:
        fit.fit(TALK, 50, count)
    assert (caught.value.prompt_tokens, caught.value.limit_tokens) == (count(TALK), 50)
    assert "drop-oldest" in caught.value.advice


def test_oldest_turns_go_whole_and_the_system_prompt_stays() -> None:
    fitted = fit.fit(TALK, count(TALK) - 1, count, "drop-oldest")
    assert fitted.messages == (TALK[0], *TALK[3:])
    assert fitted.dropped_messages == 2
    fitted = fit.fit(TALK, 18, count, "drop-oldest")
    assert fitted.messages == (TALK[0], TALK[-1])
    assert (fitted.tokens, fitted.dropped_messages) == (18, 6)


def test_a_last_turn_that_is_too_long_is_refused() -> None:
    with pytest.raises(ContextOverflowError) as caught:
        fit.fit(TALK, 17, count, "drop-oldest")
    assert (caught.value.prompt_tokens, caught.value.limit_tokens) == (18, 17)
    with pytest.raises(ContextOverflowError):
        fit.fit([said("user", "x" * 9)], 1, count, "drop-oldest")


def test_equal_messages_are_not_mixed_up() -> None:
    same = said("user", "xx")
    assert fit.without_oldest((same, same, same), 1) == (same, same)


roles = st.sampled_from(["system", "user", "assistant", "tool", "developer"])
talks = st.lists(st.builds(said, roles, st.text(alphabet="x", max_size=8)), min_size=1, max_size=14)


@given(talks, st.integers(min_value=0, max_value=120))
def test_drops_the_fewest_turns_that_make_it_fit(talk: list[Message], limit: int) -> None:
    candidates = [fit.without_oldest(talk, turns) for turns in range(max(fit.count_turns(talk), 1))]
    fitting = [candidate for candidate in candidates if count(candidate) <= limit]
    if not fitting:
        with pytest.raises(ContextOverflowError):
            fit.fit(talk, limit, count, "drop-oldest")
        return
    fitted = fit.fit(talk, limit, count, "drop-oldest")
    assert fitted.messages == fitting[0]
    assert fitted.dropped_messages == len(talk) - len(fitting[0])
    kept = [message for message in talk if message.role in {"system", "developer"}]
    assert [message for message in fitted.messages if message.role in {"system", "developer"}] == kept
