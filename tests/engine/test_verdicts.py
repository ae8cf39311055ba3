from __future__ import annotations

import os
import stat
import sys
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest

from edgellama.engine.base import EngineOptions
from edgellama.engine.probe import FileMark, ladder, reference_of
from edgellama.engine.verdicts import Outcome, Record, Verdicts

ASKED = EngineOptions()
RUNGS = ladder(ASKED, 32)
AT = [rung.name for rung in RUNGS]


def find(verdicts: Verdicts, identity: str = "id") -> Record:
    return verdicts.find("model.gguf", identity, "llamacpp", ASKED)


def write(folder: Path, *attempts: tuple[int, Outcome], boot: str = "one") -> None:
    verdicts = Verdicts(folder, boot)
    record = find(verdicts)
    for rung, outcome in attempts:
        record = verdicts.add(record, AT[rung], outcome)


def first(folder: Path, boot: str = "one") -> int:
    verdicts = Verdicts(folder, boot)
    return verdicts.first_rung(find(verdicts), RUNGS)


@pytest.mark.parametrize(
    ("attempts", "begin"),
    [
        ([], 0),
        ([(0, "agreed")], 0),
        ([(0, "crashed"), (1, "agreed")], 1),
        ([(0, "crashed"), (1, "disagreed"), (2, "finite-only")], 2),
        ([(0, "crashed")], 1),
        ([(0, "non-finite"), (1, "crashed")], 2),
        ([(0, "failed")], 0),
        ([(0, "interrupted")], 0),
        ([(1, "agreed"), (1, "crashed")], 0),
        ([(i, "crashed") for i in range(len(RUNGS))], 0),
    ],
)
def test_where_the_next_start_begins(tmp_path: Path, attempts: list[tuple[int, Outcome]], begin: int) -> None:
    write(tmp_path, *attempts)
    assert first(tmp_path) == begin


def test_an_attempt_that_took_the_machine_down_is_not_repeated(tmp_path: Path) -> None:
    write(tmp_path, (0, "trying"))
    assert first(tmp_path, boot="one") == 0  # its user ended it, or it is still going on
    assert first(tmp_path, boot="two") == 1


def test_the_mark_is_on_disk_before_the_attempt_and_replaced_after_it(tmp_path: Path) -> None:
    verdicts = Verdicts(tmp_path, "one")
    record = verdicts.add(find(verdicts), AT[0], "trying")
    assert [a.outcome for a in find(Verdicts(tmp_path)).attempts] == ["trying"]
    verdicts.add(record, AT[0], "agreed")
    assert [a.outcome for a in find(Verdicts(tmp_path)).attempts] == ["agreed"]


def test_a_failure_that_may_pass_is_tried_again_after_a_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, (0, "failed"), (1, "agreed"))
    assert first(tmp_path) == 1
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 2 * 24 * 3600)
    assert first(tmp_path) == 0


def test_verdicts_of_other_files_engines_and_settings_are_apart(tmp_path: Path) -> None:
    write(tmp_path, (0, "crashed"))
    verdicts = Verdicts(tmp_path)
    assert not find(verdicts, "another").attempts
    assert not verdicts.find("model.gguf", "id", "fake", ASKED).attempts
    other = msgspec.structs.replace(ASKED, kv_type_key="q8_0")
    assert not verdicts.find("model.gguf", "id", "llamacpp", other).attempts


def files(folder: Path) -> list[Path]:
    return sorted((folder / "verdicts").glob("*.json"))


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[]", b'{"schema": 1}', b'{"schema": "x"}', b"null"])
def test_a_damaged_verdict_is_ignored_aloud_and_replaced(tmp_path: Path, content: bytes) -> None:
    write(tmp_path, (0, "crashed"))
    files(tmp_path)[0].write_bytes(content)
    verdicts = Verdicts(tmp_path, "one")
    record = find(verdicts)
    assert not record.attempts
    assert len(verdicts.notices) == 1
    verdicts.add(record, AT[0], "agreed")
    assert first(tmp_path) == 0


def test_a_newer_verdict_is_refused_politely_and_left_alone(tmp_path: Path) -> None:
    write(tmp_path, (0, "crashed"))
    path = files(tmp_path)[0]
    path.write_bytes(b'{"schema": 2, "whatever": true}')
    verdicts = Verdicts(tmp_path, "one")
    record = verdicts.add(find(verdicts), AT[0], "agreed")
    assert record.serving() is not None  # for this start
    assert path.read_bytes() == b'{"schema": 2, "whatever": true}'
    assert any("newer version" in notice for notice in verdicts.notices)


@pytest.mark.skipif(sys.platform == "win32" or os.geteuid() == 0, reason="permissions do not bind here")
def test_a_folder_that_cannot_be_written_is_told_once(tmp_path: Path) -> None:
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    verdicts = Verdicts(tmp_path)
    record = verdicts.add(find(verdicts), AT[0], "trying")
    verdicts.add(record, AT[0], "agreed")
    tmp_path.chmod(stat.S_IRWXU)
    assert len(verdicts.notices) == 1


def test_a_file_where_the_folder_should_be_is_told_once(tmp_path: Path) -> None:
    place = tmp_path / "cache"
    place.write_text("not a folder")
    verdicts = Verdicts(place)
    record = verdicts.add(find(verdicts), AT[0], "trying")
    verdicts.add(record, AT[0], "agreed")
    assert record.attempts
    assert verdicts.notices


def test_listing_shows_every_record_and_skips_the_unreadable(tmp_path: Path) -> None:
    write(tmp_path, (0, "agreed"))
    (tmp_path / "verdicts" / "zz.json").write_bytes(b"{")
    verdicts = Verdicts(tmp_path)
    assert [record.model for record in verdicts.listing()] == ["model.gguf"]
    assert len(verdicts.notices) == 1


def test_history_is_bounded(tmp_path: Path) -> None:
    verdicts = Verdicts(tmp_path)
    record = find(verdicts)
    for _ in range(100):
        record = verdicts.add(record, AT[0], "failed")
    assert len(record.attempts) <= 32


def test_a_kept_reference_is_found_for_the_same_file_only(tmp_path: Path) -> None:
    mark = FileMark(size_bytes=1, header_sha256="aa")
    rows = np.random.default_rng(0).normal(size=(9, 100)).astype(np.float32)
    kept = reference_of(mark, "test", range(9), rows)
    Verdicts(tmp_path).keep_reference(kept)
    assert Verdicts(tmp_path).reference(mark) == kept
    assert Verdicts(tmp_path).reference(FileMark(size_bytes=2, header_sha256="aa")) is None
