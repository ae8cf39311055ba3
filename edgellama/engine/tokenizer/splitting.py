"""Cutting a text into words, stage by stage: each stage cuts the pieces of the one before, and keeps every character.

Regular expressions run on a view of the text where a letter stands for each class of code points beyond ASCII, as
llama.cpp does it; a view is as long as the text, so that positions are the text's own.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from itertools import chain, pairwise

from edgellama.engine.tokenizer import code_points

Cuts = list[int]
"""Ends of pieces, ascending; the last is the text's length."""
Stage = Callable[["Views", Cuts], Cuts]


class Views:
    """A text and its replaced forms, each made when first asked for."""

    def __init__(self, text: str) -> None:
        self.text = text

    @functools.cached_property
    def classes(self) -> str:
        return code_points.collapsed(self.text)

    @functools.cached_property
    def classes_with_han(self) -> str:
        return code_points.collapsed(self.text, han=True)

    @functools.cached_property
    def plain_spaces(self) -> str:
        return code_points.plain_spaces(self.text)


def _runs(pattern: re.Pattern[str], view: str, cuts: Cuts) -> Iterator[tuple[int, int, int]]:
    """(end of the piece, start, end) of each match, and (end, end, end) after the last of each piece."""
    start = 0
    for end in cuts:
        for match in pattern.finditer(view, start, end):
            yield end, match.start(), match.end()
        yield end, end, end
        start = end


def matches(expression: str, view: str = "classes") -> Stage:
    """Each match of `expression`, and what lies between two matches, becomes a piece. Matches may not be empty."""
    pattern = re.compile(expression, re.ASCII)

    def stage(views: Views, cuts: Cuts) -> Cuts:
        found: Cuts = []
        text = getattr(views, view)
        last = 0
        for piece_end in cuts:
            for match in pattern.finditer(text, last, piece_end):
                start, end = match.span()
                if start > last:
                    found.append(start)
                found.append(end)
                last = end
            if last < piece_end:
                found.append(piece_end)
                last = piece_end
        return found

    return stage


def thousands(expression: str, view: str, *, leading: bool) -> Stage:
    """Runs of digits are cut into threes from their end.

    `leading`: what stands in front of a run goes with its first digits, and the run's end is cut. Otherwise a run is
    cut from what stands in front where its length is a multiple of three, and goes with what follows.
    """
    pattern = re.compile(expression, re.ASCII)

    def stage(views: Views, cuts: Cuts) -> Cuts:
        found: Cuts = []
        last = 0
        for piece_end, start, end in _runs(pattern, getattr(views, view), cuts):
            first = start + (end - start) % 3
            inner = range(first, end + 1, 3) if leading else range(first, end, 3)
            found += [cut for cut in inner if cut > last and (cut > start or not leading)]
            last = found[-1] if found else 0
            if start == end == piece_end and last < piece_end:
                found.append(piece_end)
                last = piece_end
        return found

    return stage


def trailing_space(views: Views, cuts: Cuts) -> Cuts:
    """White space at the end of a piece becomes one of its own."""
    found: Cuts = []
    view = views.plain_spaces
    start = 0
    for end in cuts:
        at = start + len(view[start:end].rstrip(" \t\n\r\v\f"))
        found += [at, end] if start < at < end else [end]
        start = end
    return found


def halving_space(views: Views, cuts: Cuts) -> Cuts:
    """Pieces of white space without a line end are cut into 512, then the largest power of two down to two."""
    found: Cuts = []
    view = views.classes
    for start, end in pairwise([0, *cuts]):
        piece = view[start:end] if end - start > 2 else "x"
        if not piece.strip(" \t\v\f"):
            at = start
            while end - at > 2:
                at += min(512, 1 << ((end - at).bit_length() - 1))
                found.append(at)
            if at < end:
                found.append(end)
        else:
            found.append(end)
    return found


def split(text: str, stages: tuple[Stage, ...]) -> Iterator[str]:
    """The words of `text`; joined they are `text`."""
    if not text:
        return iter(())
    views = Views(text)
    cuts = [len(text)]
    for stage in stages:
        cuts = stage(views, cuts)
    return map(text.__getitem__, map(slice, chain((0,), cuts), cuts))
