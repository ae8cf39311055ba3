"""The scripts' own options; every other argument is passed on."""

from __future__ import annotations

from dataclasses import dataclass, field

from bootstrap.errors import USAGE, SetupError

VALUES = ("--backend", "--wheelhouse", "--make-wheelhouse")
FLAGS = ("--rebuild",)
BACKENDS = ("auto", "cpu", "cuda", "metal", "vulkan", "rocm")
_TAKES_TEXT = ("--prompt", "-p", "--system")


@dataclass
class Options:
    """What was asked of the script, and what goes on to edgellama or pytest."""

    backend: str = ""
    wheelhouse: str = ""
    make_wheelhouse: str = ""
    rebuild: bool = False
    help: bool = False
    rest: list[str] = field(default_factory=list)

    @property
    def quiet(self) -> bool:
        return bool({"--quiet", "-q"} & set(self.rest))

    @property
    def verbose(self) -> bool:
        return bool({"--verbose", "-v"} & set(self.rest))

    @property
    def offline(self) -> bool:
        return "--offline" in self.rest


def parse(arguments: list[str]) -> Options:
    """Take the script's own options out of `arguments`; what follows `--` is never one of them."""
    options = Options()
    waiting = list(arguments)
    while waiting:
        word = waiting.pop(0)
        name, equals, value = word.partition("=")
        if word == "--":
            options.rest += [word, *waiting]
            break
        if name in VALUES:
            if not equals and not waiting:
                raise SetupError(f"{name} needs a value", code=USAGE)
            setattr(options, name[2:].replace("-", "_"), value if equals else waiting.pop(0))
        elif word in FLAGS:
            options.rebuild = True
        elif word in {"--help", "-h"}:
            options.help = True
        else:
            options.rest.append(word)
            if word in _TAKES_TEXT and waiting:
                options.rest.append(waiting.pop(0))
    if options.backend and options.backend not in BACKENDS:
        raise SetupError(f"--backend is one of {', '.join(BACKENDS)}, not {options.backend!r}", code=USAGE)
    return options
