"""Thinking and answer, streamed: the result may not depend on where the text is cut."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgellama.chat import reasoning
from edgellama.chat.reasoning import FORMATS, HARMONY, Format, ReasoningSplitter

THINK = next(form for form in FORMATS if form.name == "think")
PEER = os.environ.get("EDGELLAMA_PEER", "")


def split(form: Format | None, text: str, size: int = 0, *, inside: bool = False) -> list[tuple[str, str]]:
    """All deltas of `text`, in pieces of `size` characters, neighbours of one kind joined."""
    splitter = ReasoningSplitter(form, inside=inside)
    parts = [text[i : i + size] for i in range(0, len(text), size)] if size else [text]
    deltas = [delta for part in parts for delta in splitter.push(part)] + splitter.flush()
    joined: list[tuple[str, str]] = []
    for kind, piece in deltas:
        assert piece
        if joined and joined[-1][0] == kind:
            joined[-1] = (kind, joined[-1][1] + piece)
        else:
            joined.append((kind, piece))
    return joined


R, T = "reasoning", "text"
CASES = [
    (THINK, False, "<think>\nstep 1\n\nstep 2\n</think>\n\nAnswer.\n", [(R, "step 1\n\nstep 2"), (T, "Answer.\n")]),
    (THINK, False, "\n<think>a</think>b", [(R, "a"), (T, "b")]),
    (THINK, False, "<think>\n\n</think>\n\nAnswer", [(T, "Answer")]),
    (THINK, False, "<think></think>", []),
    (THINK, False, "Hello <think>x</think>", [(T, "Hello <think>x</think>")]),
    (THINK, False, "<think>a</think>b <think>c</think>", [(R, "a"), (T, "b <think>c</think>")]),
    (THINK, False, "  <thin is a prefix", [(T, "  <thin is a prefix")]),
    (THINK, False, "  ", [(T, "  ")]),
    (THINK, False, "<think>never closed </thin", [(R, "never closed </thin")]),
    (THINK, False, "<thi", [(T, "<thi")]),
    (THINK, False, "<think>a</think>\n\n    code\n", [(R, "a"), (T, "    code\n")]),
    (THINK, False, "<think>a < b </ c</think> d", [(R, "a < b </ c"), (T, "d")]),
    (THINK, True, "step\n</think>\n\nAnswer", [(R, "step"), (T, "Answer")]),
    (THINK, True, "<think>\nagain</think>x", [(R, "again"), (T, "x")]),
    (THINK, True, "only thought", [(R, "only thought")]),
    (THINK, True, "\n</think>\n\nx", [(T, "x")]),
    (THINK, True, "<thing> first</think>x", [(R, "<thing> first"), (T, "x")]),
    (THINK, False, "<think>思考中👩🏽‍🚀\n</think>答え。é", [(R, "思考中👩🏽‍🚀"), (T, "答え。é")]),
    (None, False, "<think>a</think>b", [(T, "<think>a</think>b")]),
    (FORMATS[1], False, "<|channel>thought\nhm<channel|>Hi", [(R, "hm"), (T, "Hi")]),
    (FORMATS[1], False, "<|channel>thought\n<channel|>Hi", [(T, "Hi")]),
    (FORMATS[1], False, "<|channel>though", [(R, "though")]),
    (
        HARMONY,
        False,
        "<|channel|>analysis<|message|>Let me see.<|end|><|start|>assistant<|channel|>final<|message|>Paris.<|return|>",
        [(R, "Let me see."), (T, "Paris.")],
    ),
    (
        HARMONY,
        False,
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json"
        '<|message|>{"x":1}<|call|>',
        [(R, "a"), (T, '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x":1}<|call|>')],
    ),
    (HARMONY, False, "<|channel|>final<|message|>a <| b", [(T, "a <| b")]),
    (HARMONY, False, "no channels <|here", [(T, "no channels <|here")]),
    (
        HARMONY,
        True,
        "already thinking<|end|><|start|>assistant<|channel|>final<|message|>x",
        [(R, "already thinking"), (T, "x")],
    ),
]


@pytest.mark.parametrize(("form", "inside", "text", "wanted"), CASES)
def test_every_cut_gives_the_same(form: Format | None, inside: bool, text: str, wanted: list[tuple[str, str]]) -> None:
    for size in range(len(text) + 1):
        assert split(form, text, size, inside=inside) == wanted, size


@given(st.sampled_from(FORMATS), st.text(), st.text(), st.integers(min_value=1, max_value=9))
def test_nothing_is_lost_and_nothing_invented(form: Format, thought: str, answer: str, size: int) -> None:
    if form is HARMONY or form.close in thought or form.open in thought or form.open.startswith(thought.strip()[:1]):
        return
    if form.noise and (form.noise in thought or form.noise.startswith(thought.strip())):
        return
    deltas = split(form, f"{form.open}\n{thought}\n{form.close}\n\n{answer}", size)
    assert "".join(text for kind, text in deltas if kind == R) == thought.strip()
    found = "".join(text for kind, text in deltas if kind == T)
    assert found.strip() == answer.strip()
    assert answer.endswith(found)


@given(
    st.lists(st.sampled_from(["<think>", "</think>", "<", "a", "\n", " ", "think>", "</"]), max_size=12), st.booleans()
)
def test_cutting_never_matters(parts: list[str], inside: bool) -> None:
    text = "".join(parts)
    whole = split(THINK, text, inside=inside)
    for size in (1, 2, 3, 5):
        assert split(THINK, text, size, inside=inside) == whole


def test_thinking_streams_before_it_ends() -> None:
    splitter = ReasoningSplitter(THINK)
    assert splitter.push("<think>\nI am ") == [("reasoning", "I am")]
    assert splitter.push("thinking <") == [("reasoning", " thinking")]
    assert splitter.push("/think>\n\nYes") == [("text", "Yes")]
    assert splitter.push(", it") == [("text", ", it")]


def test_the_prompt_tells_whether_thinking_has_begun() -> None:
    assert reasoning.opens(THINK, "<|im_start|>assistant\n<think>\n")
    assert not reasoning.opens(THINK, "<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert not reasoning.opens(THINK, "write <think> please<|im_end|>\n<|im_start|>assistant\n")
    assert not reasoning.opens(THINK, "<|im_start|>assistant\n")


def test_the_format_is_found_in_the_source() -> None:
    assert reasoning.choose("{{ '<think>' }}{{ '</think>' }}") is THINK
    assert reasoning.choose("plain") is None
    assert reasoning.choose("{{ '<|channel|>analysis<|message|>' }}") is HARMONY


@pytest.mark.skipif(not PEER, reason="EDGELLAMA_PEER names no llama.cpp build folder")
@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("Qwen-Qwen3-0.6B", "think"),
        ("openai-gpt-oss-120b", "harmony"),
        ("google-gemma-4-31B-it", "gemma"),
        ("CohereForAI-c4ai-command-r7b-12-2024-tool_use", "cohere"),
        ("mistralai-Ministral-3-14B-Reasoning-2512", "mistral"),
        ("ByteDance-Seed-OSS", "seed"),
        ("Apriel-1.6-15b-Thinker-fixed", "apriel"),
        ("unsloth-Apriel-1.5", "apriel"),
        ("meta-llama-Llama-3.2-3B-Instruct", None),
    ],
)
def test_published_templates(file: str, name: str | None) -> None:
    source = (Path(PEER) / "src" / "models" / "templates" / f"{file}.jinja").read_text(encoding="utf-8")
    form = reasoning.choose(source)
    assert (form and form.name) == name
