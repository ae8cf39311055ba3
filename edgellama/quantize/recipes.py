"""llama.cpp's recipes as data: name, file type number, base tensor type. Our own additions are in `protect.py`.

Source of names and numbers: llama.h (llama_ftype) and tools/quantize of the pinned llama.cpp.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from edgellama.errors import UsageError
from edgellama.gguf_io import GGMLType as T


@dataclass(frozen=True, slots=True)
class Recipe:
    """A mix of tensor types. `family` is the name the rules speak of (aliases share it)."""

    name: str
    file_type: int
    base: T
    note: str = ""

    @property
    def copies(self) -> bool:
        """Whether tensors keep their types."""
        return self.name == "COPY"


_ROWS = (
    ("F32", 0, T.F32, "32-bit floats"),
    ("F16", 1, T.F16, "16-bit floats"),
    ("BF16", 32, T.BF16, "16-bit floats with float32's range"),
    ("Q4_0", 2, T.Q4_0, "4.34 GiB, +0.4685 perplexity on Llama-3-8B"),
    ("Q4_1", 3, T.Q4_1, "4.78 GiB, +0.4511 perplexity on Llama-3-8B"),
    ("Q5_0", 8, T.Q5_0, "5.21 GiB, +0.1316 perplexity on Llama-3-8B"),
    ("Q5_1", 9, T.Q5_1, "5.65 GiB, +0.1062 perplexity on Llama-3-8B"),
    ("Q8_0", 7, T.Q8_0, "7.96 GiB, +0.0026 perplexity on Llama-3-8B"),
    ("Q2_K", 10, T.Q2_K, "2.96 GiB, +3.5199 perplexity on Llama-3-8B"),
    ("Q2_K_S", 21, T.Q2_K, "2.96 GiB, +3.1836 perplexity on Llama-3-8B, needs an importance matrix"),
    ("Q3_K_S", 11, T.Q3_K, "3.41 GiB, +1.6321 perplexity on Llama-3-8B"),
    ("Q3_K_M", 12, T.Q3_K, "3.74 GiB, +0.6569 perplexity on Llama-3-8B"),
    ("Q3_K_L", 13, T.Q3_K, "4.03 GiB, +0.5562 perplexity on Llama-3-8B"),
    ("Q4_K_S", 14, T.Q4_K, "4.37 GiB, +0.2689 perplexity on Llama-3-8B"),
    ("Q4_K_M", 15, T.Q4_K, "4.58 GiB, +0.1754 perplexity on Llama-3-8B"),
    ("Q5_K_S", 16, T.Q5_K, "5.21 GiB, +0.1049 perplexity on Llama-3-8B"),
    ("Q5_K_M", 17, T.Q5_K, "5.33 GiB, +0.0569 perplexity on Llama-3-8B"),
    ("Q6_K", 18, T.Q6_K, "6.14 GiB, +0.0217 perplexity on Llama-3-8B"),
    ("IQ4_NL", 25, T.IQ4_NL, "4.50 bits per weight, nonlinear"),
    ("IQ4_XS", 30, T.IQ4_XS, "4.25 bits per weight, nonlinear"),
    ("MXFP4_MOE", 38, T.MXFP4, "experts in MXFP4, the rest in Q8_0"),
    ("TQ1_0", 36, T.TQ1_0, "1.69 bits per weight, for ternary models"),
    ("TQ2_0", 37, T.TQ2_0, "2.06 bits per weight, for ternary models"),
    ("IQ1_S", 24, T.IQ1_S, "1.56 bits per weight, needs an importance matrix"),
    ("IQ1_M", 31, T.IQ1_M, "1.75 bits per weight, needs an importance matrix"),
    ("IQ2_XXS", 19, T.IQ2_XXS, "2.06 bits per weight, needs an importance matrix"),
    ("IQ2_XS", 20, T.IQ2_XS, "2.31 bits per weight, needs an importance matrix"),
    ("IQ2_S", 28, T.IQ2_XS, "2.5 bits per weight, needs an importance matrix"),
    ("IQ2_M", 29, T.IQ2_S, "2.7 bits per weight, needs an importance matrix"),
    ("IQ3_XXS", 23, T.IQ3_XXS, "3.06 bits per weight, needs an importance matrix"),
    ("IQ3_XS", 22, T.IQ3_S, "3.3 bits per weight"),
    ("IQ3_S", 26, T.IQ3_S, "3.44 bits per weight"),
    ("IQ3_M", 27, T.IQ3_S, "3.66 bits per weight"),
    ("Q1_0", 40, T.Q1_0, "1.125 bits per weight"),
    ("Q2_0", 41, T.Q2_0, "2.25 bits per weight"),
    ("COPY", 0, T.F32, "keeps every tensor's type"),
)
RECIPES: dict[str, Recipe] = {row[0]: Recipe(*row) for row in _ROWS}
ALIASES = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}

NEEDS_IMPORTANCE = frozenset({T.IQ3_XXS, T.IQ2_XXS, T.IQ2_XS, T.IQ2_S, T.IQ1_M, T.IQ1_S})
"""Types that are garbage without an importance matrix (embeddings and output excepted)."""


def recipe(name: str) -> Recipe:
    """The recipe of that name, in any case, or of that file type number; raises UsageError with close names."""
    upper = ALIASES.get(name.upper(), name.upper())
    if upper in RECIPES:
        return RECIPES[upper]
    for candidate in RECIPES.values():
        if name == str(candidate.file_type) and not candidate.copies:
            return candidate
    close = difflib.get_close_matches(upper, [*RECIPES, *ALIASES], 3)
    raise UsageError(f"there is no recipe {name!r}", f"did you mean {', '.join(close)}?" if close else "see --list")


def tensor_type(name: str) -> T:
    """A tensor type by name, in any case; raises UsageError."""
    try:
        return T[name.upper()]
    except KeyError:
        close = difflib.get_close_matches(name.upper(), T.__members__, 3)
        advice = f"did you mean {', '.join(close)}?" if close else f"known are {', '.join(T.__members__)}"
        raise UsageError(f"there is no tensor type {name!r}", advice) from None
