"""What to do when a worker died: the policy, without any process.

A first death is answered by a plain restart, or by a step down the ladder where trying again would be useless: after an
illegal instruction, and at settings that killed the worker under another request before. A request during which a
second worker dies is suspect and runs once more at the plainest settings: if it dies there too, the request is poison,
and the settings are as they were before it; if it survives, the settings were to blame, and one step down remains.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from edgellama.errors import EngineCrashError, PoisonError
from edgellama.runtime.journal import Journal
from edgellama.runtime.ladder import Ladder
from edgellama.runtime.supervisor import Death

FATAL_DEATHS = 3
_MOST_RESTARTS = 12


@dataclass(slots=True)
class Recovery:
    """Remembers deaths and moves the ladder."""

    ladder: Ladder
    restarts: int = 0
    _in_a_row: int = 0
    _killers: defaultdict[int, set[str]] = field(default_factory=lambda: defaultdict(set))
    _before: tuple[int, int] | None = None
    """Rung and leanness before the present suspect's plainest run."""

    def died(self, journal: Journal, death: Death) -> str:
        """A worker died during a request: choose the next settings. Returns words for the user.

        Raises `PoisonError` when the request is given up, `EngineCrashError` when restarting does not help any more.
        """
        self.restarts += 1
        self._in_a_row += 1
        journal.deaths += 1
        others = self._killers[self.ladder.rung] - {journal.request_id}
        self._killers[self.ladder.rung].add(journal.request_id)
        what = f"the engine's process {death.words}"
        if journal.deaths >= FATAL_DEATHS:
            self._give_back()
            raise _poison(journal, what, death)
        if self._in_a_row > _MOST_RESTARTS:
            raise _hopeless(what, death, self._in_a_row)
        before = self.ladder.words
        if journal.deaths == FATAL_DEATHS - 1:
            self._before = (self.ladder.rung, self.ladder.lean)
            self.ladder.go_plainest(only_memory=death.killed)
        elif death.illegal_instruction:
            self.ladder.step_down(what, "crashed")
        elif others and not (death.killed and self.ladder.step_leaner()):
            self.ladder.step_down(what)
        change = f", now with {self.ladder.words}" if self.ladder.words != before else ""
        return f"{what}; it was restarted{change}, and the answer goes on"

    def died_idle(self, death: Death) -> str:
        """A worker ended that nobody was using. Returns words for the user, none when it was meant to end."""
        if death.cause == "closed":
            return ""
        self.restarts += 1
        return f"the engine's process {death.words} while nothing ran; it was restarted"

    def survived(self) -> bool:
        """A request ended. True when the worker should be replaced by one at better settings."""
        self._in_a_row = 0
        if self._before is None:
            return False
        plainest = self.ladder.rung
        self._give_back()
        self.ladder.step_down("a request survived only at plainer settings")
        return self.ladder.rung != plainest

    def backoff_seconds(self) -> float:
        """How long to wait before the next start."""
        return 0.0 if self._in_a_row < 2 else min(10.0, 0.1 * 2.0 ** (self._in_a_row - 2))

    def _give_back(self) -> None:
        if self._before is not None:
            self.ladder.rung, self.ladder.lean = self._before
            self._before = None


def _poison(journal: Journal, what: str, death: Death) -> PoisonError:
    return PoisonError(
        f"this request was given up: {what}, for the {journal.deaths}rd time during it, also alone at the plainest "
        f"settings; its {len(journal.tokens)} tokens so far are kept{_log(death)}",
        "other requests go on; change the prompt or use another model, and please report this one",
    )


def _hopeless(what: str, death: Death, deaths: int) -> EngineCrashError:
    return EngineCrashError(
        f"{what}; that was death {deaths} in a row, and restarting does not help{_log(death)}",
        "edgellama doctor shows what this machine has",
    )


def _log(death: Death) -> str:
    lines = "\n".join(death.log[-8:])
    return f"\nLast lines of the engine:\n{lines}" if lines else ""
