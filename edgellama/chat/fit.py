"""Fits a conversation into a context by whole turns. Pure: counting tokens is the caller's."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Literal, NamedTuple

from edgellama.chat.messages import Message
from edgellama.errors import ContextOverflowError

Policy = Literal["refuse", "drop-oldest"]
_ADVICE_REFUSE = "shorten the conversation, take a larger --ctx, or let old turns go with --context-policy drop-oldest"
_ADVICE_DROP = "shorten the last message or the system prompt, or take a larger --ctx"


class Fitted(NamedTuple):
    """The conversation that fits, its tokens, and how many messages were left out."""

    messages: tuple[Message, ...]
    tokens: int
    dropped_messages: int


def count_turns(messages: Sequence[Message]) -> int:
    """Turns: a user message with all that answers it, tool results too. System and developer messages are in none."""
    return max(_turn_numbers(messages), default=-1) + 1


def without_oldest(messages: Sequence[Message], turns: int) -> tuple[Message, ...]:
    """`messages` in their order without the `turns` oldest turns; system and developer messages stay."""
    numbered = zip(messages, _turn_numbers(messages), strict=True)
    return tuple(message for message, turn in numbered if turn < 0 or turn >= turns)


def _turn_numbers(messages: Sequence[Message]) -> list[int]:
    """The turn of each message from 0 on, -1 for system and developer messages."""
    numbers = []
    turn = -1
    for message in messages:
        if message.role in {"system", "developer"}:
            numbers.append(-1)
            continue
        if message.role == "user" or turn < 0:
            turn += 1
        numbers.append(turn)
    return numbers


def steps(
    messages: Sequence[Message], limit_tokens: int, policy: Policy
) -> Generator[tuple[Message, ...], int, Fitted]:
    """The search, for callers that count asynchronously: yields a conversation, wants its tokens sent back.

    Raises `ContextOverflowError` when the last turn with the system prompt is too long, or at once under `refuse`.
    """
    messages = tuple(messages)
    whole = yield messages
    if whole <= limit_tokens:
        return Fitted(messages, whole, 0)
    if policy == "refuse":
        raise ContextOverflowError(whole, limit_tokens, _ADVICE_REFUSE)
    tokens = whole
    best: Fitted | None = None
    low, high = 1, count_turns(messages) - 1
    while low <= high:
        middle = (low + high) // 2
        shorter = without_oldest(messages, middle)
        tokens = yield shorter
        if tokens <= limit_tokens:
            best = Fitted(shorter, tokens, len(messages) - len(shorter))
            high = middle - 1
        else:
            low = middle + 1
    if best is None:
        raise ContextOverflowError(tokens, limit_tokens, _ADVICE_DROP)
    return best


def fit(
    messages: Sequence[Message], limit_tokens: int, count: Callable[[Sequence[Message]], int], policy: Policy = "refuse"
) -> Fitted:
    """The longest end of the conversation that has at most `limit_tokens` by `count`. Raises `ContextOverflowError`."""
    search = steps(messages, limit_tokens, policy)
    try:
        asked = next(search)
        while True:
            asked = search.send(count(asked))
    except StopIteration as done:
        result: Fitted = done.value
        return result
