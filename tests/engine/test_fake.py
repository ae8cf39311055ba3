"""The fake engine's script: scripted answers, and faults that really happen, in a process of their own."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgellama.engine import factory, fake
from edgellama.engine.base import Batch, Engine, EngineOptions
from edgellama.engine.fake import Answer, Fault, Script
from edgellama.errors import (
    AbortedError,
    ContextOverflowError,
    EngineError,
    EngineLoadError,
    InvalidFileError,
    MemoryShortageError,
    NotFoundError,
)

CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


def load(folder: Path, script: Script, **options: Any) -> Engine:
    path = fake.write_script(folder / "script é.fake.json", script)
    return factory("fake")(str(path), EngineOptions(context_tokens=1024, sequences=4, **options))


def greedy(engine: Engine, prompt: str, sequence: int = 0, limit: int = 200) -> str:
    tokenizer = engine.tokenizer
    ids = tokenizer.tokenize(prompt, special=True)
    start = engine.sequence_length(sequence)
    answer: list[int] = []
    rows = engine.decode(Batch.one_sequence(ids, start, sequence))
    while len(answer) < limit:
        token = int(rows[-1].argmax())
        if tokenizer.is_end(token):
            break
        answer.append(token)
        rows = engine.decode(Batch.one_sequence([token], engine.sequence_length(sequence), sequence))
    return b"".join(map(tokenizer.piece, answer)).decode()


def test_answers_follow_the_last_matching_question(tmp_path: Path) -> None:
    answers = (Answer(contains="France", say="Paris 🗼."), Answer(contains="Spain", say="Madrid."))
    engine = load(tmp_path, Script(say="No idea.", answers=answers, pieces=("Par", "is")))
    assert greedy(engine, CHAT.format("capital of France?")) == "Paris 🗼."
    assert greedy(engine, "<|im_end|>\n" + CHAT.format("and Spain?")) == "Madrid."
    assert greedy(engine, CHAT.format("capital of France?"), 1) == "Paris 🗼."
    assert greedy(engine, CHAT.format("meaning of life?"), 2) == "No idea."
    assert greedy(engine, "a raw prompt", 3) == "No idea."


@pytest.mark.parametrize("said", ["abab c", "aaab", "", "nana banana"])
def test_an_answer_goes_on_where_it_was_cut(tmp_path: Path, said: str) -> None:
    engine = load(tmp_path, Script(say=said))
    for cut in range(len(said) + 1):
        engine.remove_sequence(0)
        assert greedy(engine, CHAT.format("x") + said[:cut]) == said[cut:]
        engine.remove_sequence(1)
        assert greedy(engine, "raw: " + said[:cut], 1) == said[cut:]


def test_hashed_text_is_printable_endless_and_depends_on_everything_before(tmp_path: Path) -> None:
    first, second = load(tmp_path, Script()), load(tmp_path, Script(seed=1))
    texts = {greedy(first, "prompt one"), greedy(first, "prompt two", 1), greedy(second, "prompt one")}
    assert len(texts) == 3
    assert all(len(text) == 200 and text.isprintable() for text in texts)


def test_scripts_are_checked(tmp_path: Path) -> None:
    wrong = ["", "[]", '{"says": "x"}', '{"faults": [{"kind": "explode"}]}', '{"bos": "<x>"}']
    wrong += ['{"faults": [{"kind": "nan", "when": {"repack": [true]}}]}', '{"pieces": ["a", "a"]}']
    for text in wrong:
        (tmp_path / "x.fake.json").write_text(text)
        with pytest.raises(InvalidFileError):
            fake.read_script(tmp_path / "x.fake.json")
    with pytest.raises(NotFoundError):
        fake.read_script(tmp_path / "none.fake.json")


def test_faults_strike_at_their_step_position_text_and_options(tmp_path: Path) -> None:
    def strikes(fault: Fault, tokens: list[list[int]], **options: Any) -> list[int]:
        engine = load(tmp_path, Script(faults=(fault,)), **options)
        struck = []
        for i, part in enumerate(tokens):
            rows = engine.decode(Batch.one_sequence(part, engine.sequence_length(0)))
            if not np.isfinite(rows).all():
                struck.append(i)
        return struck

    parts = [[65, 66], [67], [68, 69], [70], [71]]
    assert strikes(Fault(kind="nan"), parts) == [0, 1, 2, 3, 4]
    assert strikes(Fault(kind="nan", phase="prefill"), parts) == [0, 2]
    assert strikes(Fault(kind="nan", phase="decode", step=2), parts) == [3]
    assert strikes(Fault(kind="nan", step=3), parts) == [2]
    assert strikes(Fault(kind="nan", position=5), parts) == [3]
    assert strikes(Fault(kind="nan", contains="CDE"), parts) == [2, 3, 4]
    assert strikes(Fault(kind="nan", token=71), parts) == [4]
    assert strikes(Fault(kind="nan", times=2), parts) == [0, 1]
    assert strikes(Fault(kind="nan", when={"repack_weights": (True,)}), parts, repack_weights=False) == []
    assert strikes(Fault(kind="nan", unless={"flash_attention": ("off",)}), parts, flash_attention="off") == []
    assert len(strikes(Fault(kind="nan", when={"kv_type_key": ("q8_0", "f16")}), parts)) == 5


def test_spoiled_rows_are_those_of_the_matching_sequence(tmp_path: Path) -> None:
    faults = (Fault(kind="nan", contains="bad"), Fault(kind="wrong", contains="odd", scale=0.5))
    engine, clean = load(tmp_path, Script(faults=faults)), load(tmp_path, Script())
    rows = {}
    for sequence, text in enumerate(("fine", "bad", "odd")):
        batch = Batch.one_sequence(engine.tokenizer.tokenize(text), 0, sequence)
        rows[text] = (engine.decode(batch), clean.decode(batch))
    assert np.array_equal(*rows["fine"])
    assert np.isnan(rows["bad"][0]).all()
    assert 0.3 < float(np.std(np.subtract(*rows["odd"]))) < 0.7


def test_faults_that_are_errors(tmp_path: Path) -> None:
    for kind, error in (("error", EngineError), ("overflow", ContextOverflowError)):
        engine = load(tmp_path, Script(faults=(Fault(kind=kind, step=2, message="told"),)))  # type: ignore[arg-type]
        engine.decode(Batch.one_sequence([65], 0))
        with pytest.raises(error, match="told" if kind == "error" else "context"):
            engine.decode(Batch.one_sequence([66], 1))
        assert engine.sequence_length(0) == 1
        engine.decode(Batch.one_sequence([66], 1))
    with pytest.raises(EngineLoadError, match="told"):
        load(tmp_path, Script(faults=(Fault(kind="error", phase="load", message="told"),)))
    with pytest.raises(MemoryShortageError):
        load(tmp_path, Script(faults=(Fault(kind="memory", phase="load", bytes=2**60),)))


@pytest.mark.parametrize("advancing", [False, True])
def test_a_hang_stands_still_or_not_as_told(tmp_path: Path, advancing: bool) -> None:
    fault = Fault(kind="hang", advancing=advancing, heeds_abort=True)
    engine = load(tmp_path, Script(faults=(fault,)))
    seen: list[int] = []

    def watch() -> None:
        for _ in range(20):
            seen.append(engine.progress())
            time.sleep(0.01)
        engine.abort()

    thread = threading.Thread(target=watch)
    thread.start()
    with pytest.raises(AbortedError):
        engine.decode(Batch.one_sequence([65], 0))
    thread.join()
    assert (len(set(seen[5:])) > 1) is advancing


def run_until_it_dies(path: Path) -> int:
    code = (
        "import sys; from edgellama.engine import factory; from edgellama.engine.base import Batch, EngineOptions;"
        "e = factory('fake')(sys.argv[1], EngineOptions());"
        "[e.decode(Batch.one_sequence([65 + i], i)) for i in range(4)]"
    )
    return subprocess.run([sys.executable, "-c", code, str(path)], check=False, timeout=60).returncode


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has exceptions instead of signals")
@pytest.mark.parametrize("name", ["SIGILL", "SIGSEGV", "SIGBUS", "SIGKILL", "SIGABRT", "SIGFPE"])
def test_signals_are_real_and_counted_over_restarts(tmp_path: Path, name: str) -> None:
    fault = Fault(kind="signal", signal=name, phase="decode", step=3, times=1)
    path = fake.write_script(tmp_path / "dies.fake.json", Script(faults=(fault,)))
    assert run_until_it_dies(path) == -getattr(signal, name)
    assert run_until_it_dies(path) == 0


def test_exit_code_and_death_while_loading(tmp_path: Path) -> None:
    path = fake.write_script(tmp_path / "exits.fake.json", Script(faults=(Fault(kind="exit", phase="load", code=77),)))
    assert run_until_it_dies(path) == 77


def test_counted_faults_need_a_writable_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgellama.engine.fake.faults.os.access", lambda *_: False)
    with pytest.raises(EngineLoadError, match="not writable"):
        load(tmp_path, Script(faults=(Fault(kind="nan", times=1),)))
    load(tmp_path, Script(faults=(Fault(kind="nan"),)))
