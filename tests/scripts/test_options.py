"""The scripts' own options are taken out; all else reaches edgellama or pytest unchanged."""

from __future__ import annotations

import pytest
from bootstrap import chat, options
from bootstrap.errors import USAGE, SetupError


def test_own_options_are_taken_and_the_rest_is_passed_on() -> None:
    found = options.parse(["--ctx", "4096", "--backend", "cuda", "--wheelhouse=a b", "--temperature", "0", "--rebuild"])
    assert (found.backend, found.wheelhouse, found.rebuild) == ("cuda", "a b", True)
    assert found.rest == ["--ctx", "4096", "--temperature", "0"]


def test_a_prompt_is_never_read_as_an_option() -> None:
    found = options.parse(["--prompt", "--help", "-p", "--rebuild"])
    assert found.rest == ["--prompt", "--help", "-p", "--rebuild"]
    assert not found.help
    assert not found.rebuild


def test_after_two_dashes_nothing_is_ours() -> None:
    assert options.parse(["--", "--backend", "x"]).rest == ["--", "--backend", "x"]


@pytest.mark.parametrize("arguments", [["--backend"], ["--backend", "gpu"], ["--wheelhouse"]])
def test_wrong_usage_is_refused(arguments: list[str]) -> None:
    with pytest.raises(SetupError) as caught:
        options.parse(arguments)
    assert caught.value.code == USAGE


@pytest.mark.parametrize(
    ("arguments", "terminal", "expected"),
    [
        ([], True, ["chat"]),
        ([], False, ["run"]),
        (["--plain"], False, ["chat", "--plain"]),
        (["--ctx", "512"], True, ["chat", "--ctx", "512"]),
        (["my.gguf"], True, ["chat", "my.gguf"]),
        (["my.gguf", "--seed", "1"], False, ["run", "my.gguf", "--seed", "1"]),
        (["--prompt", "Hi"], True, ["run", "--prompt", "Hi"]),
        (["--prompt=Hi", "--json"], True, ["run", "--prompt=Hi", "--json"]),
        (["hf:a/b", "-p", "Hi"], True, ["run", "hf:a/b", "-p", "Hi"]),
        (["--system", "x", "--", "--prompt"], True, ["chat", "--system", "x", "--", "--prompt"]),
    ],
)
def test_what_edgellama_is_asked(arguments: list[str], terminal: bool, expected: list[str]) -> None:
    assert chat.command(arguments, stdin_is_terminal=terminal) == expected
