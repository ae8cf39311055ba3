"""What must survive a worker: everything needed to go on with an answer in another process."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from edgellama.runtime.messages import Generate, Step
from edgellama.sampling.options import BUILT_IN, SamplingOptions, merge


@dataclass(slots=True)
class Journal:
    """One running request: its prompt once it is known, and what it has emitted so far."""

    request_id: str
    prompt: tuple[int, ...] = ()
    sampling: SamplingOptions = BUILT_IN
    """Complete, with a seed, so that a restart draws the same numbers."""
    max_tokens: int = 0
    stop: tuple[str, ...] = ()
    show: tuple[str, ...] = ()
    """Control-token texts that the answer's splitter needs to see."""
    tokens: list[int] = field(default_factory=list)
    state: bytes = b""
    resumed: int = 0
    """Tokens it had when the present worker took over."""
    deaths: int = 0
    """Workers that died during it."""

    def add(self, step: Step) -> None:
        """A token arrived; its text goes out in the same breath, so a restart neither loses nor repeats it."""
        self.tokens.append(step.token)
        self.state = step.state

    def message(self) -> Generate:
        """Start or go on with the request."""
        self.resumed = len(self.tokens)
        return Generate(
            request_id=self.request_id,
            prompt=self.prompt,
            resume=tuple(self.tokens),
            state=self.state,
            sampling=self.sampling,
            max_tokens=self.max_tokens,
            stop=self.stop,
            show=self.show,
        )


def complete(layers: Iterable[SamplingOptions]) -> SamplingOptions:
    """Merged sampling options with a seed; one is drawn when none is given."""
    merged = merge(layers)
    return merged if merged.seed is not None else msgspec.structs.replace(merged, seed=secrets.randbits(32))
