"""Which languages and kinds of text a calibration text holds, roughly: enough to say that one is missing."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

LEAST_SHARE = 0.05
"""A language or kind below this share of the text counts as missing."""
_SAMPLE = 400_000
_SCRIPTS = {
    "zh": "\u4e00-\u9fff\u3400-\u4dbf",
    "ja": "\u3040-\u30ff",
    "ko": "\uac00-\ud7af\u1100-\u11ff",
    "ru": "\u0400-\u04ff",
    "el": "\u0370-\u03ff",
    "ar": "\u0600-\u06ff",
    "he": "\u0590-\u05ff",
    "hi": "\u0900-\u097f",
    "th": "\u0e00-\u0e7f",
}
"""Languages told by their letters, as the letters' ranges in a regular expression."""
_WORDS = {
    "en": "the of and to in is was that for with",
    "de": "der die und das ist nicht mit von den ein",
    "fr": "le la les des et est dans que une pour",
    "es": "el los las que una por con para del como",
    "it": "il di che della per con una sono nel gli",
    "pt": "os que uma para com não por mais dos ao",
    "nl": "het een van en dat niet met zijn voor op",
}
"""Languages told by their most common words."""
_USUAL = 0.15
"""Share of these words in an ordinary text of that language."""
_CODE = re.compile(
    r"^\s*(def |class |import |from \w+ import|return\b|if .*[:{]$|for .*[:{]$|while .*[:{]$|#include|(public|private|"
    r"static|const|let|var|fn|func|int|void) |[})\]]+;?\s*$|//|/\*|.*[;{]\s*$|.*\w\(.*\)\s*$|\w+(\.\w+)* [-+*/|&]?= )"
)
_MATH = re.compile(r"\\(frac|sum|int|sqrt|begin)|\$[^$\n]+\$|\d+\s*[-+*/^]\s*\d+\s*=|=\s*-?\d|[∑∫√≤≥≠∀∃∈]")
_CHAT = re.compile(r"<\|im_start\|>|<\|start_header_id\|>|\[INST\]|^\s*(user|assistant|human|system)\s*:", re.I | re.M)


def _share_of_lines(pattern: re.Pattern[str]) -> Callable[[str], float]:
    def share(text: str) -> float:
        lines = [line for line in text.splitlines() if line.strip()]
        return sum(pattern.search(line) is not None for line in lines) / max(1, len(lines))

    return share


_KINDS: dict[str, Callable[[str], float]] = {
    "code": _share_of_lines(_CODE),
    "math": _share_of_lines(_MATH),
    "chat": lambda text: len(_CHAT.findall(text)) / max(1, len(text) / 2000),
}
NAMES = (*_WORDS, *_SCRIPTS, *_KINDS)


def share(text: str, name: str) -> float:
    """Share of a language or kind in a text, 0 to 1. `name` is one of `NAMES`."""
    if len(text) > _SAMPLE:  # from all over the text
        step = len(text) // 8
        text = "\n".join(text[at : at + _SAMPLE // 8] for at in range(0, step * 8, step))
    if name in _SCRIPTS:
        letters = sum(character.isalpha() for character in text)
        return len(re.findall(f"[{_SCRIPTS[name]}]", text)) / max(1, letters)
    if name in _WORDS:
        found = re.findall(r"[^\W\d_]+", text.lower())
        common = set(_WORDS[name].split())
        return min(1.0, sum(word in common for word in found) / max(1, len(found)) / _USUAL)
    return min(1.0, _KINDS[name](text))


def missing(text: str, wanted: Sequence[str]) -> list[str]:
    """Warnings for wanted languages and kinds that the text hardly has."""
    found = [(name, share(text, name)) for name in wanted]
    return [
        f"the text is {part:.1%} {name}: the model will be quantized without regard to it; add such text"
        for name, part in found
        if part < LEAST_SHARE
    ]
