"""Whether the private environment is complete: one small file, read on every start. Imports little, on purpose."""

import hashlib
import os
import sys

FORMAT = "1"
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__))))


def venv_folder() -> str:
    """The private environment: `$EDGELLAMA_VENV`, else `.venv` in the checkout."""
    chosen = os.environ.get("EDGELLAMA_VENV")
    return os.path.abspath(os.path.expanduser(chosen)) if chosen else os.path.join(ROOT, ".venv")


def venv_python(venv: str) -> str:
    """Its interpreter."""
    return (
        os.path.join(venv, "Scripts", "python.exe") if sys.platform == "win32" else os.path.join(venv, "bin", "python")
    )


def stamp_path(venv: str) -> str:
    """Where the stamp lies."""
    return os.path.join(venv, ".edgellama-ready")


def source_digest(venv: str) -> str:
    """Changes when what must be installed changes: the declared packages, or the place of checkout or environment."""
    digest = hashlib.sha256()
    with open(os.path.join(ROOT, "pyproject.toml"), "rb") as stream:
        digest.update(stream.read())
    for part in (FORMAT, ROOT, venv):
        digest.update(b"\0" + os.fsencode(part))
    return digest.hexdigest()


def interpreter(venv: str) -> str:
    """The base interpreter behind the environment; another one after a system upgrade means: make it again."""
    return os.path.realpath(venv_python(venv))


def read(venv: str) -> dict[str, str]:
    """The stamp's fields; empty if there is none."""
    try:
        with open(stamp_path(venv), encoding="utf-8") as stream:
            lines = stream.read().splitlines()
    except (OSError, UnicodeDecodeError):
        return {}
    return dict(line.split("=", 1) for line in lines if "=" in line)


def write(venv: str, fields: dict[str, str]) -> None:
    """Write the stamp of a complete environment, so that a reader sees all of it or none."""
    write_as_is(venv, {**fields, "source": source_digest(venv), "python": interpreter(venv)})


def write_as_is(venv: str, lines: dict[str, str]) -> None:
    """Write these fields. With an empty `source` they only remember what was chosen."""
    temporary = f"{stamp_path(venv)}.{os.getpid()}.tmp"
    with open(temporary, "w", encoding="utf-8") as stream:
        stream.writelines(f"{key}={value}\n" for key, value in lines.items())
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary, stamp_path(venv))


def is_ready(venv: str, fields: dict[str, str], *, extras: set[str], backend: str = "", wheelhouse: str = "") -> bool:
    """Whether the environment has `extras`, and the backend and wheelhouse asked for (empty: whatever it has)."""
    if not fields or not os.path.exists(venv_python(venv)):
        return False
    return (
        fields.get("source") == source_digest(venv)
        and fields.get("python") == interpreter(venv)
        and extras <= set(fields.get("extras", "").split(","))
        and (not backend or backend == fields.get("backend_asked"))
        and (not wheelhouse or wheelhouse == fields.get("wheelhouse"))
    )
