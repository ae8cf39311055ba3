"""Every `tokenizer.ggml.pre`: how a byte-level BPE vocabulary cuts text into words before it merges.

The regular expressions are those of the models' own tokenizers in the form in which llama.cpp runs them, its
simplifications included (upper and lower case are told apart in ASCII only), since ids have to equal its ids.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

from edgellama.engine.tokenizer.splitting import Stage, halving_space, matches, thousands, trailing_space
from edgellama.errors import UnsupportedError

# Members of classes in a view where one letter stands for each class beyond ASCII: see `code_points`.
_L = "A-Za-z\xd2"
_N = "0-9\xd1"
_P = r"!-#%-*,-/:;?@\[-\]_{}\xd3"
_M = "\xd4"
_S = r"$+<->\^`|~\xd5"
_HAN = "\xd6\xd7"
_UPPER, _LOWER = "A-Z\xd2", "a-z\xd2"  # letters beyond ASCII have both

_SUFFIX = "'(?:[sStTmMdD]|[rR][eE]|[vV][eE]|[lL][lL])"
_REST = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_OTHERS = rf"| ?[^\s{_L}{_N}]+[\r\n]*"
_ASCII_WORD = r"[!-/:-@\[-`{-~][A-Za-z]+"

_GPT2 = rf"'s|'t|'re|'ve|'m|'ll|'d| ?[{_L}]+| ?[{_N}]+| ?[^\s{_L}{_N}]+|\s+(?!\S)|\s+"
_KIMI = rf"[{_HAN}]+|[^\r\n{_L}\xd6{_N}]?[{_L}]+(?:{_SUFFIX})?|[{_N}]{{1,3}}| ?[^\s{_L}\xd6{_N}]+[\r\n]*" + _REST
_CJK_WIDE = "[\u0800-\u9fa5\uac00-\ud7ff]+"
_CJK = "[\u4e00-\u9fa5\u3040-\u30ff]+"
_CASED = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376"
    "\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-"
    "\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a"
    "\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4"
    "\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc"
    "\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f"
    "\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b"
    "\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    "\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_YOUTU_SCRIPTS = (
    "[\uac00-\ud7a3\u3131-\u318e]+"
    "|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
    f"|[\u3105-\u312f]+|{_CJK}"
)
_AFMOE_SCRIPTS = (
    "[\u4e00-\u9fff\u3400-\u4dbf\u8c48-\ufaff\u3040-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f\u0e80-\u0eff"
    "\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)
_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"


def _modern(*, letters: str = _L, suffix: str = f"{_SUFFIX}|", digits: str = "", others: str = _OTHERS) -> str:
    """The family of expressions that began with GPT-4: words may start with one character that is no letter."""
    return rf"{suffix}[^\r\n{_L}{_N}]?[{letters}]+|[{_N}]{digits}{others}{_REST}"


def _cased(upper: str, lower: str, *, suffix: str = "", digits: str = "") -> str:
    """The family that began with GPT-4o: a word ends where lower case turns to upper case."""
    words = (rf"[^\r\n{_L}{_N}]?[{upper}]{a}[{lower}]{b}{suffix}" for a, b in ("*+", "+*"))
    return rf"{'|'.join(words)}|[{_N}]{digits}| ?[^\s{_L}{_N}]+[\r\n/]*{_REST}"


def _deepseek3(line_ends: str = r"[\r\n]*|\s*[\r\n]+") -> str:
    return rf"{_ASCII_WORD}|[^\r\n{_L}{_P}{_S}]?[{_L}{_M}]+| ?[{_P}{_S}]+{line_ends}|\s+(?!\S)|\s+"


_LAST_LINE_END = r"|\s*[\r\n]|\s+(?!\S)|\s+"
_OPTIONAL_SUFFIX = f"(?:{_SUFFIX})?"
_UPPER_MARK, _LOWER_MARK, _ANY_MARK = _UPPER + _M, _LOWER + _M, _L + _M

_SPLITS: dict[str, Callable[[], tuple[Stage, ...]]] = {
    "default": lambda: (
        matches(rf"[{_P}$+<=>\^~|]+"),
        matches(_GPT2),
        matches(rf"[{_N}]+"),
        matches("[0-9][0-9][0-9]", "text"),
    ),
    "gpt2": lambda: (matches(_GPT2),),
    "digits": lambda: (matches(rf"[{_N}]"), matches(_GPT2)),
    "llama3": lambda: (matches(_modern(digits="{1,3}")),),
    "qwen2": lambda: (matches(_modern()),),
    "qwen35": lambda: (matches(_modern(letters=_ANY_MARK, others=rf"| ?[^\s{_L}{_M}{_N}]+[\r\n]*")),),
    "ufakzeka": lambda: (matches(_modern(suffix="")),),
    "seed-coder": lambda: (matches(_modern(others=rf"| ?[^\s{_L}{_N}\r\n]+")),),
    "bailingmoe": lambda: (matches(rf"{_SUFFIX}|[^\r\n{_L}{_N}]?[{_L}]+|[{_N}]{_OTHERS}{_LAST_LINE_END}"),),
    "minicpm5": lambda: (matches(rf"[{_N}]{{1,3}}"), matches(_modern(digits="+"))),
    "laguna": lambda: (matches(r"[^\n]+|\n+", "text"), matches(_modern())),
    "jais-2": lambda: (matches(_modern(digits="{1,3}")), halving_space),
    "exaone-moe": lambda: (
        matches(
            rf"{_SUFFIX}|[^\r\n{_L}{_N}]?(?:[{_L}]{_M}*(?: [{_L}]{_M}*)*)+"
            rf"|[{_N}]| ?[^\s{_L}{_N}]+[\r\n/]?{_LAST_LINE_END}"
        ),
    ),
    "deepseek-llm": lambda: (
        matches(r"[\r\n]", "text"),
        matches(rf"\s?[{_CASED}]+", "plain_spaces"),
        matches("\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+", "plain_spaces"),
        trailing_space,
        matches(_CJK_WIDE, "plain_spaces"),
        matches(rf"[{_N}]+"),
    ),
    "deepseek-coder": lambda: (
        matches(r"[\r\n]", "text"),
        matches(rf"\s?[{_L}]+"),
        matches(rf"\s?[{_P}]+"),
        matches(_CJK_WIDE, "plain_spaces"),
        matches(rf"[{_N}]"),
    ),
    "deepseek-v3": lambda: (matches(rf"[{_N}]{{1,3}}"), matches(_CJK, "text"), matches(_deepseek3())),
    "spark2_5": lambda: (
        matches(rf"[{_N}]{{1,3}}"),
        matches(_CJK, "text"),
        matches(_deepseek3(r"|[\r\n]")),
        matches(rf"[{_N}]"),
    ),
    "afmoe": lambda: (
        thousands(rf"[{_N}]+", "classes", leading=True),
        matches(_AFMOE_SCRIPTS, "plain_spaces"),
        matches(_deepseek3()),
    ),
    "youtu": lambda: (
        matches(_YOUTU_SCRIPTS, "plain_spaces"),
        matches(_cased(_ANY_MARK, _ANY_MARK, suffix=_OPTIONAL_SUFFIX)),
    ),
    "falcon": lambda: (
        matches(rf"[{_P}$+<=>\^~|`]+"),
        matches(_GPT2),
        matches("[0-9][0-9][0-9]", "text"),
    ),
    "bloom": lambda: (matches(_BLOOM, "plain_spaces"),),
    "viking": lambda: (matches(_BLOOM, "plain_spaces"), matches(rf"[{_N}]")),
    "tekken": lambda: (matches(_cased(_UPPER, _LOWER)),),
    "gpt-4o": lambda: (matches(_cased(_UPPER, _LOWER, suffix=_OPTIONAL_SUFFIX, digits="{1,3}")),),
    "granite": lambda: (matches(_cased(_UPPER_MARK, _LOWER_MARK, suffix=_OPTIONAL_SUFFIX, digits="{1,3}")),),
    "tiny_aya": lambda: (
        thousands(rf"[{_N}]+", "classes", leading=True),
        matches(_cased(_ANY_MARK, _ANY_MARK, suffix=_OPTIONAL_SUFFIX, digits="{1,3}")),
    ),
    "kimi-k2": lambda: (matches(_KIMI, "classes_with_han"),),
    "superbpe": lambda: (matches(rf"[{_N}]+"), thousands("[0-9]+", "text", leading=False)),
    "chameleon": lambda: (
        matches("<sentinel:[0-9]+>", "text"),
        matches("IMGIMG[A-I]{1,4}Z", "text"),
        matches("[\t\n]|    |  ", "text"),
        matches(rf"[{_N}]"),
        matches(rf"[{_P}!-/:-@\[-`{{-~]"),
        matches(_GPT2),
    ),
    "lines": lambda: (matches(r"[^\n]+|\n+", "text"),),
    "whitespace": lambda: (matches(r"\S+", "plain_spaces"),),
}


class PreTokenizer(NamedTuple):
    """What a `tokenizer.ggml.pre` decides."""

    splits: str
    """Key of the stages."""
    whole_words: bool = False
    """A word that is a token needs no merges."""
    add_bos: bool = False
    no_bos: bool = False
    """Without a key for it there is no token that begins a text."""
    byte_letters: bool = True
    """Bytes are written as GPT-2's letters; otherwise text is merged as it is, with `<0x0A>` for unknown bytes."""
    escape_spaces: bool = False
    """Spaces become U+2581."""
    gemma: bool = False
    """A text always begins with `bos`, and a run of line ends that is a token stays whole."""

    @property
    def stages(self) -> tuple[Stage, ...]:
        return _stages(self.splits)


@functools.cache
def _stages(splits: str) -> tuple[Stage, ...]:
    return _SPLITS[splits]()


def _named() -> dict[str, PreTokenizer]:
    llama3 = PreTokenizer("llama3", whole_words=True, add_bos=True)
    sarvam = PreTokenizer("lines", byte_letters=False, escape_spaces=True)
    gemma = sarvam._replace(gemma=True)
    special = {
        "minicpm5": PreTokenizer("minicpm5", whole_words=True),
        "youtu": PreTokenizer("youtu", whole_words=True),
        "granite-embed-multi-97m": PreTokenizer("granite", whole_words=True),
        "tekken": PreTokenizer("tekken", whole_words=True, add_bos=True),
        "chameleon": PreTokenizer("chameleon", add_bos=True),
        "chatglm-bpe": PreTokenizer("llama3", no_bos=True),
        "glm4": PreTokenizer("llama3", whole_words=True, no_bos=True),
        "glm5": PreTokenizer("llama3", whole_words=True, no_bos=True),
        "whitespace": PreTokenizer("whitespace", byte_letters=False),
        "gemma4": gemma,
        "granite-embed-multi-311m": gemma,
        "sarvam-moe": sarvam,
    }
    groups = {
        llama3: "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
        PreTokenizer("llama3"): "dbrx smaug-bpe",
        PreTokenizer("gpt2"): (
            "gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert mpt olmo jais "
            "trillion granite-docling exaone4 jina-v1-en jina-v2-code roberta-bpe"
        ),
        PreTokenizer("digits"): "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2",
        PreTokenizer("qwen2"): ("qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2"),
        PreTokenizer("deepseek-v3"): "deepseek-v3 hunyuan-dense joyai-llm hy_v4",
        PreTokenizer("bloom"): "bloom poro-chat gpt3-finnish",
        PreTokenizer("gpt-4o"): "gpt-4o llama4 kanana2 talkie minimax-m2",
        PreTokenizer("tiny_aya"): "tiny_aya cohere2moe",
        PreTokenizer("bailingmoe"): "bailingmoe bailingmoe2 llada-moe",
    }
    same = (
        "default qwen35 ufakzeka seed-coder laguna jais-2 exaone-moe deepseek-llm deepseek-coder spark2_5 afmoe falcon "
        "viking kimi-k2 superbpe"
    )
    named = {name: PreTokenizer(name) for name in same.split()} | special
    for kind, names in groups.items():
        named |= dict.fromkeys(names.split(), kind)
    return named


NAMED = _named()
"""Pre-tokenizers by `tokenizer.ggml.pre`."""


def find(name: str) -> PreTokenizer:
    """The pre-tokenizer of that name; an empty name means `default`. Raises `UnsupportedError` for unknown ones."""
    known = NAMED.get(name or "default")
    if known is None:
        advice = "a newer version may know it; the llama.cpp engine, where installed, may too"
        raise UnsupportedError(f"the pre-tokenizer {name!r} is not known here (tokenizer.ggml.pre)", advice)
    return known
