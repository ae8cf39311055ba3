"""What every engine must do, whatever computes its numbers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgellama.engine.base import Batch, Engine
from edgellama.errors import (
    AbortedError,
    ContextOverflowError,
    EngineError,
    InvalidFileError,
    UnsupportedError,
    UsageError,
)

MakeEngine = Callable[..., Engine]
Rows = NDArray[np.float32]


def rows_of(engine: Engine, tokens: list[int], start: int = 0, sequence: int = 0) -> Rows:
    return engine.decode(Batch.one_sequence(tokens, start, sequence, "all")).copy()


def assert_same(found: Rows, expected: Rows) -> None:
    """Equal up to the noise of another batch shape. Rows of different histories differ by more than 1 somewhere."""
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, atol=0.03, rtol=0)


def test_one_token_at_a_time_equals_all_at_once(make_engine: MakeEngine, tokens: list[int]) -> None:
    engine = make_engine()
    at_once = rows_of(engine, tokens, sequence=0)
    singly = np.concatenate([rows_of(engine, [token], i, sequence=1) for i, token in enumerate(tokens)])
    assert_same(singly, at_once)
    assert float(np.abs(at_once[1:] - at_once[:-1]).max(1).min()) > 1


def test_chunked_prefill_equals_all_at_once(make_engine: MakeEngine, tokens: list[int]) -> None:
    engine = make_engine()
    at_once = rows_of(engine, tokens)
    chunks = [rows_of(engine, tokens[i : i + 7], i, sequence=2) for i in range(0, len(tokens), 7)]
    assert_same(np.concatenate(chunks), at_once)


def test_rows_follow_want_logits(make_engine: MakeEngine, tokens: list[int]) -> None:
    engine = make_engine()
    every = rows_of(engine, tokens)
    batch = Batch.one_sequence(tokens, 0, 1, "none")
    batch.want_logits[[3, 4, 17, 39]] = True
    assert_same(engine.decode(batch).copy(), every[[3, 4, 17, 39]])
    assert engine.decode(Batch.one_sequence(tokens, 0, 2, "none")).shape == (0, every.shape[1])
    assert engine.decode(Batch.one_sequence([], 0)).shape == (0, every.shape[1])


def test_rows_of_interleaved_sequences_keep_the_order_of_the_batch(make_engine: MakeEngine, tokens: list[int]) -> None:
    engine = make_engine()
    other = tokens[::-1]
    alone, other_alone = rows_of(engine, tokens, sequence=0), rows_of(engine, other, sequence=1)
    mixed = Batch(
        np.stack([tokens, other], 1).ravel().astype(np.int32),
        np.repeat(np.arange(len(tokens), dtype=np.int32), 2),
        np.tile(np.array([3, 2], np.int32), len(tokens)),
        np.ones(2 * len(tokens), np.bool_),
    )
    rows = engine.decode(mixed).copy()
    assert_same(rows[0::2], alone)
    assert_same(rows[1::2], other_alone)


def test_prefill_of_one_beside_steps_of_another(make_engine: MakeEngine, tokens: list[int]) -> None:
    engine = make_engine()
    alone = rows_of(engine, tokens)
    rows_of(engine, tokens[:10], sequence=1)
    batch = Batch(
        np.array([*tokens[:20], tokens[10]], np.int32),
        np.array([*range(20), 10], np.int32),
        np.array([2] * 20 + [1], np.int32),
        np.array([False] * 19 + [True, True]),
    )
    assert_same(engine.decode(batch).copy(), alone[[19, 10]])


@pytest.mark.parametrize("unified", [True, False])
def test_copy_of_a_whole_sequence(make_engine: MakeEngine, tokens: list[int], unified: bool) -> None:
    engine = make_engine(unified_kv=unified)
    cold = rows_of(engine, tokens)
    rows_of(engine, tokens[:30], sequence=1)
    engine.copy_sequence(1, 3)
    assert engine.sequence_length(3) == 30
    assert_same(rows_of(engine, tokens[30:], 30, sequence=3), cold[30:])
    assert_same(rows_of(engine, tokens[30:], 30, sequence=1), cold[30:])


def test_copied_prefix_serves_another_continuation(make_engine: MakeEngine, tokens: list[int]) -> None:
    engine = make_engine()
    other = tokens[:20] + tokens[:20]
    cold = rows_of(engine, other)
    rows_of(engine, tokens, sequence=1)
    engine.copy_sequence(1, 2, 0, 20)
    assert engine.sequence_length(2) == 20
    assert_same(rows_of(engine, other[20:], 20, sequence=2), cold[20:])
    engine.remove_sequence(1)
    assert engine.sequence_length(2) == 40  # shared cells live on


def test_copy_onto_held_positions_is_refused(make_engine: MakeEngine, tokens: list[int]) -> None:
    engine = make_engine()
    rows_of(engine, tokens, sequence=0)
    rows_of(engine, tokens[:5], sequence=1)
    with pytest.raises(UsageError):
        engine.copy_sequence(0, 1)
    assert engine.sequence_length(1) == 5


def test_partial_copy_between_separate_caches_is_refused(make_engine: MakeEngine, tokens: list[int]) -> None:
    engine = make_engine(unified_kv=False)
    assert not engine.capabilities.copy_range
    cold = rows_of(engine, tokens)
    with pytest.raises(UnsupportedError):
        engine.copy_sequence(0, 1, 0, 20)
    assert engine.sequence_length(1) == 0
    assert_same(rows_of(engine, tokens, sequence=1), cold)


def test_removed_tail_can_be_replaced(make_engine: MakeEngine, tokens: list[int]) -> None:
    engine = make_engine()
    other = tokens[:15] + tokens[:10]
    cold = rows_of(engine, other, sequence=1)
    rows_of(engine, tokens)
    assert engine.remove_sequence(0, 15)
    assert engine.sequence_length(0) == 15
    assert_same(rows_of(engine, other[15:], 15), cold[15:])
    assert engine.remove_sequence(0)
    assert engine.sequence_length(0) == 0
    assert_same(rows_of(engine, other), cold)


def test_shift_of_a_whole_sequence_changes_nothing_relative(make_engine: MakeEngine, tokens: list[int]) -> None:
    engine = make_engine()
    cold = rows_of(engine, tokens)
    rows_of(engine, tokens[:25], sequence=1)
    engine.shift_sequence(1, 0, -1, 50)
    assert engine.sequence_length(1) == 75
    assert_same(rows_of(engine, tokens[25:], 75, sequence=1), cold[25:])
    with pytest.raises(UsageError):
        engine.shift_sequence(1, 0, -1, -1000)


def test_removing_the_middle_and_closing_the_gap(make_engine: MakeEngine, tokens: list[int]) -> None:
    engine = make_engine()
    rows_of(engine, tokens)
    assert engine.remove_sequence(0, 4, 10)
    engine.shift_sequence(0, 10, -1, -6)
    assert engine.sequence_length(0) == len(tokens) - 6
    assert np.isfinite(rows_of(engine, tokens[:2], len(tokens) - 6)).all()


@pytest.mark.parametrize("unified", [True, False])
def test_saved_state_continues_in_another_sequence_and_engine(
    make_engine: MakeEngine, tokens: list[int], unified: bool
) -> None:
    engine, second = make_engine(unified_kv=unified), make_engine(unified_kv=unified)
    cold = rows_of(engine, tokens)
    rows_of(engine, tokens[:30], sequence=1)
    state = engine.save_sequence(1)
    rows_of(engine, tokens[::-1], sequence=2)
    for target, sequence in ((engine, 2), (second, 0)):
        target.restore_sequence(sequence, state)
        assert target.sequence_length(sequence) == 30
        assert_same(rows_of(target, tokens[30:], 30, sequence), cold[30:])


def test_state_saved_right_after_a_shift(make_engine: MakeEngine, tokens: list[int]) -> None:
    engine = make_engine()
    cold = rows_of(engine, tokens)
    rows_of(engine, tokens[:25], sequence=1)
    engine.shift_sequence(1, 0, -1, 50)
    state = engine.save_sequence(1)
    assert engine.sequence_length(1) == 75
    engine.restore_sequence(3, state)
    assert_same(rows_of(engine, tokens[25:], 75, sequence=3), cold[25:])


def test_state_saved_right_after_a_copy_between_separate_caches(make_engine: MakeEngine, tokens: list[int]) -> None:
    engine = make_engine(unified_kv=False)
    cold = rows_of(engine, tokens)
    rows_of(engine, tokens[:25], sequence=1)
    engine.copy_sequence(1, 2)
    state = engine.save_sequence(2)
    assert engine.sequence_length(2) == 25
    engine.restore_sequence(3, state)
    assert_same(rows_of(engine, tokens[25:], 25, sequence=3), cold[25:])


@pytest.mark.parametrize("damage", ["empty", "short", "flipped", "foreign", "other type"])
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(
    make_engine: MakeEngine, tokens: list[int], damage: str
) -> None:
    engine = make_engine()
    cold = rows_of(engine, tokens)
    state = bytearray(engine.save_sequence(0))
    if damage == "other type":
        other = make_engine(kv_type_key="f16", kv_type_value="f16")
        rows_of(other, tokens[:5])
        state = bytearray(other.save_sequence(0))
    elif damage == "flipped":
        state[len(state) // 2] ^= 1
    else:
        state = {"empty": bytearray(), "short": state[: len(state) // 2], "foreign": bytearray(b"ggsq" * 50)}[damage]
    rows_of(engine, tokens[:30], sequence=1)
    with pytest.raises(InvalidFileError):
        engine.restore_sequence(1, bytes(state))
    assert engine.sequence_length(1) == 30
    assert_same(rows_of(engine, tokens[30:], 30, sequence=1), cold[30:])


def test_context_overflow_leaves_everything_as_it_was(make_engine: MakeEngine, tokens: list[int]) -> None:
    engine = make_engine(context_tokens=60, sequences=2)
    cold = rows_of(engine, tokens)
    rows_of(engine, tokens[:30], sequence=1)
    with pytest.raises(ContextOverflowError) as caught:
        engine.decode(Batch.one_sequence(tokens, 30, 1))
    assert (caught.value.prompt_tokens, caught.value.limit_tokens) == (70, 60)
    assert engine.sequence_length(1) == 30
    assert_same(rows_of(engine, tokens[30:], 30, sequence=1), cold[30:])


def test_wrong_batches_are_refused_and_leave_everything_as_it_was(make_engine: MakeEngine, tokens: list[int]) -> None:
    engine = make_engine(batch_tokens=64)
    cold = rows_of(engine, tokens)
    rows_of(engine, tokens[:30], sequence=1)
    size = engine.info.vocabulary_tokens
    wrong: list[tuple[type[Exception], Batch]] = [
        (EngineError, Batch.one_sequence(tokens[:3], 20, 1)),  # positions it already holds
        (EngineError, Batch.one_sequence(tokens[:3], 40, 1)),  # a gap
        (EngineError, Batch.one_sequence([size], 30, 1)),
        (EngineError, Batch.one_sequence([-1], 30, 1)),
        (UsageError, Batch.one_sequence([5], 0, 4)),
        (UsageError, Batch.one_sequence([5], 0, -1)),
        (UsageError, Batch.one_sequence([5] * 65, 30, 1)),
    ]
    for error, batch in wrong:
        with pytest.raises(error):
            engine.decode(batch)
        assert engine.sequence_length(1) == 30
    for sequence in (-1, 4):
        with pytest.raises(UsageError):
            engine.sequence_length(sequence)
        with pytest.raises(UsageError):
            engine.copy_sequence(0, sequence)
        with pytest.raises(UsageError):
            engine.remove_sequence(sequence)
    assert_same(rows_of(engine, tokens[30:], 30, sequence=1), cold[30:])


def test_abort_from_another_thread(make_engine: MakeEngine, tokens: list[int]) -> None:
    engine = make_engine(context_tokens=8192, sequences=2, batch_tokens=8192)
    cold = rows_of(engine, tokens)
    rows_of(engine, tokens[:30], sequence=1)
    engine.abort()  # between calls: nothing happens
    started = engine.progress()

    def stop() -> None:
        while engine.progress() < started + 20:
            time.sleep(0.0005)
        engine.abort()

    thread = threading.Thread(target=stop)
    thread.start()
    try:
        with pytest.raises(AbortedError):
            engine.decode(Batch.one_sequence([9] * 8000, 30, 1))
    finally:
        thread.join()
    assert engine.sequence_length(1) == 30
    assert_same(rows_of(engine, tokens[30:], 30, sequence=1), cold[30:])


def test_progress_grows_and_never_falls(make_engine: MakeEngine, tokens: list[int]) -> None:
    fractions: list[float] = []
    engine = make_engine(on_progress=fractions.append)
    assert fractions
    assert fractions == sorted(fractions)
    assert 0 <= fractions[0] <= fractions[-1] <= 1
    seen = [engine.progress()]
    for i, token in enumerate(tokens):
        engine.decode(Batch.one_sequence([token], i))
        seen.append(engine.progress())
    assert seen == sorted(set(seen))


def test_loading_stops_when_the_callback_raises(make_engine: MakeEngine) -> None:
    def refuse(fraction: float) -> None:
        raise KeyboardInterrupt(f"at {fraction}")

    with pytest.raises(KeyboardInterrupt):
        make_engine(on_progress=refuse)


def test_embeddings(make_engine: MakeEngine, tokens: list[int]) -> None:
    plain = make_engine()
    with pytest.raises(UnsupportedError):
        plain.embed(Batch.one_sequence(tokens, 0))
    engine = make_engine(embeddings=True, pooling="mean")
    assert engine.capabilities.embeddings
    first = engine.embed(Batch.one_sequence(tokens, 0, 1))
    second = engine.embed(Batch.one_sequence(tokens[:7], 0, 1))
    assert first.shape == second.shape == (1, engine.info.embedding_length)
    a, b = Batch.one_sequence(tokens, 0, 3), Batch.one_sequence(tokens[:7], 0, 0)
    names = ("tokens", "positions", "sequences", "want_logits")
    both = Batch(*(np.concatenate([getattr(a, name), getattr(b, name)]) for name in names))
    np.testing.assert_allclose(engine.embed(both), np.concatenate([second, first]), atol=1e-3)
    assert float(np.linalg.norm(first - second)) > 0.1 * float(np.linalg.norm(first))
    assert [engine.sequence_length(s) for s in range(4)] == [0, 0, 0, 0]
    assert_same(rows_of(engine, tokens), rows_of(plain, tokens))
    with pytest.raises(UsageError):
        engine.embed(Batch.one_sequence(tokens, 40, 0))


def test_threads_can_change(make_engine: MakeEngine, tokens: list[int]) -> None:
    engine = make_engine(threads=1)
    cold = rows_of(engine, tokens)
    engine.set_threads(2, 2)
    assert_same(rows_of(engine, tokens, sequence=1), cold)
    with pytest.raises(UsageError):
        engine.set_threads(0, 1)


def test_close_is_final_and_idempotent(make_engine: MakeEngine, tokens: list[int]) -> None:
    engine = make_engine()
    rows_of(engine, tokens)
    engine.close()
    engine.close()
    calls: list[Callable[[], Any]] = [
        lambda: engine.decode(Batch.one_sequence(tokens, 0)),
        lambda: engine.sequence_length(0),
        lambda: engine.save_sequence(0),
        lambda: engine.remove_sequence(0),
    ]
    for call in calls:
        with pytest.raises(EngineError):
            call()
    engine.abort()
    engine.progress()


def test_info_tells_what_was_asked(make_engine: MakeEngine) -> None:
    info = make_engine(context_tokens=300, sequences=3, threads=2).info
    assert (info.context_tokens, info.sequences, info.threads) == (300, 3, 2)
    assert info.vocabulary_tokens > 256
    assert info.backend_build
    assert info.devices


HARD_TEXTS = [
    "plain words",
    " leading and trailing ",
    "é à ü ñ — “quotes” … ‰",
    "日本語のテキスト 한국어 العربية עברית नमस्ते ไทย",
    "👩‍👩‍👧‍👦 🏳️‍🌈 🇫🇷 e\u0301 \u200b\ufeff|",
    "tabs\tand\nnewlines\r\n\x00\x01\x7f",
    "\U0010ffff\U00010000\ud7ff\ue000",
    "long" * 40,
]


@pytest.mark.parametrize("text", HARD_TEXTS)
def test_text_survives_the_tokenizer(make_engine: MakeEngine, text: str) -> None:
    tokenizer = make_engine().tokenizer
    ids = tokenizer.tokenize(text)
    assert all(0 <= token < tokenizer.size for token in ids)
    assert b"".join(map(tokenizer.piece, ids)).decode() in (text, " " + text)  # some models put a space in front


def test_half_a_surrogate_pair_becomes_a_replacement_character(make_engine: MakeEngine) -> None:
    tokenizer = make_engine().tokenizer
    assert b"".join(map(tokenizer.piece, tokenizer.tokenize("a\ud800b"))).strip().decode() == "a\ufffdb"
    assert tokenizer.tokenize("\ud83d\ude00") == tokenizer.tokenize("\U0001f600")


def test_control_texts_become_control_tokens_only_when_asked(make_engine: MakeEngine) -> None:
    tokenizer = make_engine().tokenizer
    text = "<|im_start|>hi<|im_end|>"
    special, plain = tokenizer.tokenize(text, special=True), tokenizer.tokenize(text)
    assert tokenizer.text_of(special[0]) == "<|im_start|>"
    assert tokenizer.text_of(special[-1]) == "<|im_end|>"
    assert tokenizer.piece(special[-1]) == b""
    assert tokenizer.is_end(special[-1])
    assert not tokenizer.is_end(special[1])
    assert b"".join(map(tokenizer.piece, plain)).strip().decode() == text
    assert {"<|im_start|>", "<|im_end|>", "<s>", "</s>"} <= set(tokenizer.control_texts())


def test_bos_follows_the_models_rule(make_engine: MakeEngine) -> None:
    tokenizer = make_engine().tokenizer
    expected = [tokenizer.bos] if tokenizer.adds_bos else []
    assert tokenizer.text_of(tokenizer.bos) == "<s>"
    assert tokenizer.is_end(tokenizer.eos)
    assert tokenizer.tokenize("hi", add_bos=True) == expected + tokenizer.tokenize("hi")
    assert tokenizer.tokenize("", add_bos=True) == expected


def test_ids_outside_the_vocabulary_are_nothing(make_engine: MakeEngine) -> None:
    tokenizer = make_engine().tokenizer
    for token in (-1, tokenizer.size, 2**31 - 1):
        assert tokenizer.piece(token) == b""
        assert tokenizer.text_of(token) == ""
        assert not tokenizer.is_end(token)


def test_tokenizing_while_a_step_runs(make_engine: MakeEngine, tokens: list[int]) -> None:
    engine = make_engine(context_tokens=2048, sequences=2, batch_tokens=2048)
    expected = [engine.tokenizer.tokenize(text) for text in HARD_TEXTS]
    cold = rows_of(engine, tokens)
    found: list[list[list[int]]] = []
    done = threading.Event()

    def work() -> None:
        while not done.is_set():
            found.append([engine.tokenizer.tokenize(text) for text in HARD_TEXTS])

    thread = threading.Thread(target=work)
    thread.start()
    try:
        engine.decode(Batch.one_sequence([9] * 1500, 0, 1))
        assert_same(engine.decode(Batch.one_sequence([tokens[0]], 1500, 1, "none")), cold[:0])
    finally:
        done.set()
        thread.join()
    assert found
    assert all(ids == expected for ids in found)
