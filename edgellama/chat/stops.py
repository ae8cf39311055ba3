"""Where an answer ends: stop strings across token boundaries, and the texts that models end a turn with."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

END_OF_TURN_TEXTS = frozenset(
    {
        "<|eot_id|>",  # Llama 3
        "<|eom_id|>",
        "<|end_of_text|>",
        "<|eot|>",  # Llama 4
        "<|eom|>",
        "<|im_end|>",  # ChatML: Qwen, SmolLM, …
        "<|endoftext|>",
        "<|end|>",  # Phi
        "<|return|>",  # gpt-oss
        "<|call|>",
        "<|flush|>",  # Solar
        "<|calls|>",
        "<end_of_turn>",  # Gemma
        "<turn|>",
        "<eos>",
        "</s>",  # Llama 2, Mistral
        "<｜end▁of▁sentence｜>",  # DeepSeek  # noqa: RUF001
        "<|END_OF_TURN_TOKEN|>",  # Cohere
        "<|end_of_turn|>",  # OpenChat
        "[|endofturn|]",  # EXAONE
        "<|endofturn|>",
        "<|role_end|>",  # Ling
        "<end_of_utterance>",  # SmolVLM
        "<EOT>",
        "<|EOT|>",  # DeepSeek Coder
        "[EOT]",  # Kimi
        "[EOS]",
        "[e~[",  # MiniMax
        "<|user|>",  # GLM: the next turn begins
        "<|observation|>",
        "<seed:eos>",
        "<|plamo:eos|>",
    }
)
"""Texts of control tokens that end a turn, in any family. A vocabulary's own subset: `end_of_turn_texts`."""

_OTHER_MEANING: tuple[tuple[frozenset[str], frozenset[str]], ...] = (
    (frozenset({"<|return|>", "<|call|>"}), frozenset({"<|end|>"})),  # ends one channel, not the turn
    (frozenset({"<|flush|>", "<|calls|>"}), frozenset({"<|end|>"})),
    (frozenset({"<|plamo:eos|>"}), frozenset({"</s>"})),
    (frozenset({"<turn|>"}), frozenset({"</s>"})),  # an ordinary word there
)
_ROLE_HEADERS = frozenset({"<|user|>", "<|observation|>"})


def end_of_turn_texts(control_texts: Iterable[str]) -> frozenset[str]:
    """Those of a vocabulary's control texts that end a turn in it."""
    known = frozenset(control_texts)
    found = known & END_OF_TURN_TEXTS
    for witnesses, excluded in _OTHER_MEANING:
        if witnesses <= known:
            found -= excluded
    if "[gMASK]" in known:  # GLM has no other end of a turn than the header of the next
        return found
    return found - _ROLE_HEADERS or found


class StopStrings:
    """Finds the first of several strings in a streamed text, and holds back only what may still become one.

    The match that is complete first wins; of those complete at the same character, the longest. It does not matter how
    the text is cut into pieces. (Aho and Corasick, 1975: the state's depth is the length of what must be held back.)
    """

    def __init__(self, stops: Iterable[str]) -> None:
        """Empty strings are ignored."""
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._match = [0]
        """Length of the longest stop string that ends in this state, 0 if none does."""
        for stop in stops:
            self._add(stop)
        self._link()
        self._held = ""
        self._state = 0
        self.stopped = False

    def _add(self, stop: str) -> None:
        state = 0
        for char in stop:
            if char not in self._next[state]:
                self._next[state][char] = len(self._next)
                self._next.append({})
                self._depth.append(self._depth[state] + 1)
                self._match.append(0)
            state = self._next[state][char]
        self._match[state] = len(stop)

    def _link(self) -> None:
        """Where each state goes on when a character does not fit: its longest suffix that is a prefix of a stop."""
        self._fail = [0] * len(self._next)
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for char, child in self._next[state].items():
                queue.append(child)
                self._fail[child] = self._step(self._fail[state], char)
            self._match[state] = self._match[state] or self._match[self._fail[state]]

    def _step(self, state: int, char: str) -> int:
        while state and char not in self._next[state]:
            state = self._fail[state]
        return self._next[state].get(char, 0)

    def push(self, text: str) -> tuple[str, bool]:
        """Text that is surely part of the answer, and whether a stop string was found (nothing follows then)."""
        if self.stopped:
            return "", True
        for index, char in enumerate(text):
            self._state = self._step(self._state, char)
            if self._match[self._state]:
                self.stopped = True
                seen = self._held + text[: index + 1]
                self._held = ""
                return seen[: len(seen) - self._match[self._state]], True
        seen = self._held + text
        cut = len(seen) - self._depth[self._state]
        self._held = seen[cut:]
        return seen[:cut], False

    def flush(self) -> str:
        """What was held back: the text has ended without a stop string."""
        held, self._held, self._state = self._held, "", 0
        return held
