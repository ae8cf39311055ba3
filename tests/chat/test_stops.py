"""Stop strings against a brute force; ends of turns by family."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgellama.chat.stops import END_OF_TURN_TEXTS, StopStrings, end_of_turn_texts


def brute_force(text: str, stops: list[str]) -> tuple[str, bool]:
    """The first end at which any stop string is complete; the longest of those."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if stop and text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))], True
    return text, False


def held_back(text: str, stops: list[str]) -> int:
    """Longest end of `text` that a stop string begins with."""
    return max((n for n in range(len(text) + 1) for s in stops if n < len(s) and text.endswith(s[:n])), default=0)


small = st.text(alphabet="abé", max_size=6)
stop_lists = st.lists(small, max_size=4)
pieces = st.lists(st.text(alphabet="abé", max_size=5), max_size=12)


@given(pieces, stop_lists)
def test_equals_brute_force_however_the_text_is_cut(parts: list[str], stops: list[str]) -> None:
    finder = StopStrings(stops)
    released = ""
    seen = ""
    for part in parts:
        text, stopped = finder.push(part)
        released += text
        seen += part
        wanted, wanted_stop = brute_force(seen, stops)
        assert stopped == wanted_stop
        if stopped:
            assert released == wanted
            assert finder.push("more") == ("", True)
            assert finder.flush() == ""
            return
        # Not a character more is held back than may still become a stop string.
        assert released == seen[: len(seen) - held_back(seen, stops)]
    assert released + finder.flush() == "".join(parts)


@pytest.mark.parametrize(
    ("stops", "text", "wanted"),
    [
        (["aab"], "aaab", "a"),
        (["abab"], "abaabab", "aba"),
        (["\n\nUser:", "</s>"], "Hi\n\nUser: x", "Hi"),
        (["abcd", "bc"], "xabcd", "xa"),
        (["c", "abc"], "abc", ""),
        (["👩‍🚀"], "go 👩‍🚀!", "go "),
        (["", "x"], "ax", "a"),
    ],
)
def test_named_cases(stops: list[str], text: str, wanted: str) -> None:
    for size in range(1, len(text) + 1):
        finder = StopStrings(stops)
        out = "".join(finder.push(text[i : i + size])[0] for i in range(0, len(text), size))
        assert out == wanted
        assert finder.stopped


def test_long_stop_strings_are_linear() -> None:
    finder = StopStrings(["a" * 5000 + "b"])
    text, stopped = finder.push("a" * 200_000)
    assert (len(text), stopped) == (195_000, False)


def test_ends_of_turns_depend_on_the_family() -> None:
    assert end_of_turn_texts(["<|im_start|>", "<|im_end|>", "<|endoftext|>"]) == {"<|im_end|>", "<|endoftext|>"}
    assert end_of_turn_texts(["<|user|>", "<|assistant|>", "<|end|>"]) == {"<|end|>"}
    # In gpt-oss <|end|> ends a channel, and in Gemma 4 </s> is an ordinary word.
    assert end_of_turn_texts(["<|return|>", "<|call|>", "<|end|>"]) == {"<|return|>", "<|call|>"}
    assert end_of_turn_texts(["<turn|>", "</s>", "<eos>"]) == {"<turn|>", "<eos>"}
    assert end_of_turn_texts(["[gMASK]", "<|user|>", "<|observation|>"]) == {"<|user|>", "<|observation|>"}
    assert end_of_turn_texts(["nothing"]) == frozenset()
    assert "<|eot_id|>" in END_OF_TURN_TEXTS
