"""Incremental decoding equals decoding at once, and never shows half a character."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from edgellama.chat.detokenize import Utf8Decoder


@given(st.lists(st.binary(max_size=5), max_size=20))
def test_any_bytes_in_any_pieces_equal_decoding_at_once(parts: list[bytes]) -> None:
    decoder = Utf8Decoder()
    text = "".join(map(decoder.push, parts)) + decoder.flush()
    assert text == b"".join(parts).decode("utf-8", "replace")


@given(st.text(), st.integers(min_value=1, max_value=3))
def test_characters_come_whole_and_at_once(text: str, size: int) -> None:
    text = text.encode("utf-8", "replace").decode()
    data = text.encode()
    decoder = Utf8Decoder()
    shown = b""
    for start in range(0, len(data), size):
        shown += decoder.push(data[start : start + size]).encode()
        done = data[: start + size]
        # Everything is shown but the unfinished character at the end.
        assert done.startswith(shown)
        assert len(done) - len(shown) < 4
        assert done[len(shown) :].decode("utf-8", "ignore") == ""
    assert decoder.flush() == ""


def test_emoji_sequence_by_single_bytes() -> None:
    emoji = "👩🏽‍🚀🇩🇪"
    decoder = Utf8Decoder()
    pieces = [decoder.push(bytes([byte])) for byte in emoji.encode()]
    assert [piece for piece in pieces if piece] == list(emoji)


def test_an_unfinished_character_becomes_one_replacement_and_the_decoder_is_new() -> None:
    decoder = Utf8Decoder()
    assert decoder.push("é🚀".encode()[:-1]) == "é"
    assert decoder.flush() == "\ufffd"
    assert decoder.push("é".encode()) == "é"


def test_replacements_follow_the_standard() -> None:
    # Unicode 15, table 3-8: one U+FFFD for each maximal subpart of an ill-formed sequence.
    data = bytes.fromhex("61 f1 80 80 e1 80 c2 62 80 63 80 bf 64")
    decoder = Utf8Decoder()
    assert "".join(decoder.push(bytes([b])) for b in data) == "a\ufffd\ufffd\ufffdb\ufffdc\ufffd\ufffdd"
