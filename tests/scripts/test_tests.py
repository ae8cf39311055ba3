"""scripts/test: every check runs, a failed one is shown, and the exit code tells."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from bootstrap import tests
from bootstrap.errors import SetupError

OK = [sys.executable, "-c", "print('all well')"]
BAD = [sys.executable, "-c", "print('a finding ü'); raise SystemExit(3)"]


def test_only_a_failed_checks_output_is_shown(capfd: pytest.CaptureFixture[str]) -> None:
    results = tests.run_checks([("one", OK), ("two", BAD), ("three", OK)])
    assert {result.name: result.status for result in results} == {"one": 0, "two": 3, "three": 0}
    out = capfd.readouterr().out
    assert "a finding" in out
    assert "all well" not in out


def test_the_type_checker_runs_for_three_platforms() -> None:
    words = [" ".join(command) for _, command in tests.checks("/env")]
    for platform in ("linux", "darwin", "win32"):
        assert any(f"--platform {platform}" in word for word in words)
    for tool in ("ruff check", "ruff format --check", "lint-imports"):
        assert any(tool in word for word in words)


@pytest.mark.parametrize(
    ("check", "pytest_status", "expected"), [(0, 0, 0), (1, 0, 1), (0, 5, 5), (1, 2, 2), (0, -6, 1), (0, 1, 1)]
)
def test_the_exit_code_tells(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], check: int, pytest_status: int, expected: int
) -> None:
    passed: list[list[str]] = []

    def run_tests(venv: str, arguments: list[str]) -> tests.Result:
        passed.append(arguments)
        return tests.Result("pytest", pytest_status, 1)

    def no_model(self: Any) -> None:
        raise SetupError("the default model could not be fetched")

    monkeypatch.setattr(tests.Setup, "is_ready", lambda self: True)
    monkeypatch.setattr(tests.Setup, "fetch_model", no_model)
    monkeypatch.setattr(tests, "run_checks", lambda commands: [tests.Result("ruff", check, 1)])
    monkeypatch.setattr(tests, "run_tests", run_tests)
    assert tests.main(["-k", "x", "--backend", "cpu"]) == expected
    assert passed == [["-k", "x"]]
    said = capsys.readouterr()
    assert "tests that need it will be skipped" in said.err
    assert ("FAILED  ruff" in said.out) == (check != 0)
