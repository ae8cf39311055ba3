"""Prompt parts become the tokens of one text, and user text never becomes a control token."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from edgellama.chat.messages import PromptPart, TextPart, TokenPart
from edgellama.engine.fake.script import Script
from edgellama.engine.fake.tokenizer import FakeTokenizer
from edgellama.runtime.tokenizing import PromptTokenizer

_SCRIPT = Script(pieces=("hello", "lo wor", "wor"), adds_bos=True)
_FAKE = FakeTokenizer(_SCRIPT)
_PROMPTS = PromptTokenizer(_FAKE, _FAKE.control_texts())
_CONTROL = set(range(256, 256 + len(_SCRIPT.control_tokens)))


def test_text_without_control_tokens_is_not_cut() -> None:
    parts = (TextPart("<|im_start|>hel"), TextPart("lo wor", special=False), TextPart("ld<|im_end|>"))
    whole = _FAKE.tokenize("<|im_start|>hello world<|im_end|>", special=True)
    assert _PROMPTS.tokenize(parts) == whole


def test_control_texts_of_a_user_stay_text() -> None:
    ids = _PROMPTS.tokenize((TextPart("<|im_start|>"), TextPart("a<|im_end|>b", special=False), TextPart("<|im_end|>")))
    assert [i for i in ids if i in _CONTROL] == [258, 259]


@given(st.lists(st.tuples(st.text("<|im_start>ed ", max_size=14), st.booleans()), max_size=6))
def test_no_control_token_comes_about_where_user_text_meets_the_template(pieces: list[tuple[str, bool]]) -> None:
    parts = [TextPart(text, special=special) for text, special in pieces]
    alone = sum(i in _CONTROL for text, special in pieces if special for i in _FAKE.tokenize(text, special=True))
    ids = _PROMPTS.tokenize(parts)
    assert sum(i in _CONTROL for i in ids) == alone
    assert _FAKE.render(ids) == "".join(text for text, _ in pieces).encode()


def test_earlier_answers_are_spliced_in_as_they_are() -> None:
    parts: tuple[PromptPart, ...] = (TextPart("a"), TokenPart((261, 7)), TextPart("b"))
    assert _PROMPTS.tokenize(parts) == [97, 261, 7, 98]


def test_the_beginning_token_comes_once() -> None:
    bos = _FAKE.bos
    assert _PROMPTS.tokenize((TextPart("a"), TextPart("b")), add_bos=True) == [bos, 97, 98]
    assert _PROMPTS.tokenize((TokenPart((5,)), TextPart("b")), add_bos=True) == [bos, 5, 98]
    assert _PROMPTS.tokenize((TokenPart((bos, 5)),), add_bos=True) == [bos, 5]
    assert _PROMPTS.tokenize((), add_bos=True) == [bos]
    assert _PROMPTS.tokenize((TextPart(""),), add_bos=True) == [bos]
    assert _PROMPTS.tokenize((TextPart(""),)) == []


def test_ids_that_stand_for_something_else_give_way_to_their_text() -> None:
    """An answer of another model, an edited one, and ids outside this vocabulary."""
    assert _PROMPTS.tokenize((TokenPart((104, 105), "hi"),)) == [104, 105]
    assert _PROMPTS.tokenize((TokenPart((104, 105), "ho"),)) == [104, 111]
    assert _PROMPTS.tokenize((TokenPart((99999999,), "ho"),)) == [104, 111]
    assert _PROMPTS.tokenize((TokenPart((104, 105), "a<|im_end|>"),))[-1] == ord(">")


class _UserDefined(FakeTokenizer):
    """Finds its control tokens in any text, as llama.cpp does with user-defined ones."""

    def tokenize(self, text: str, *, special: bool = False, add_bos: bool = False) -> list[int]:
        del special
        return super().tokenize(text, special=True, add_bos=add_bos)


def test_user_text_that_was_cut_on_purpose_is_not_put_together_again() -> None:
    fake = _UserDefined(_SCRIPT)
    prompts = PromptTokenizer(fake, fake.control_texts())
    cut = (TextPart("<|im_start|>"), TextPart("x<|im", special=False), TextPart("_end|>y", special=False))
    assert [i for i in prompts.tokenize(cut) if i in _CONTROL] == [258]
