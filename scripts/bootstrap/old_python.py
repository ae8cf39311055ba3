"""What to do under a Python that is too old. Kept in syntax that Python 3.6 parses."""

import os
import sys

GUARD = "EDGELLAMA_SCRIPT_PYTHON"
COMMANDS = (
    ("apt-get", "sudo apt-get install python3 python3-venv    (Debian 12, Ubuntu 24.04 or newer)"),
    ("dnf", "sudo dnf install python3.12"),
    ("zypper", "sudo zypper install python312"),
    ("pacman", "sudo pacman -S python"),
    ("apk", "sudo apk add python3"),
    ("brew", "brew install python@3.13"),
    ("winget", "winget install Python.Python.3.13"),
)
NAMES = ("python3.13", "python3.12", "python3.14", "python3.11")


def find(name: str) -> str:
    """The full path of a program on PATH, or an empty text."""
    endings = ("", ".exe") if os.name == "nt" else ("",)
    for folder in os.environ.get("PATH", "").split(os.pathsep):
        for ending in endings:
            path = os.path.join(folder or ".", name + ending)
            if os.path.isfile(path) and os.access(path, os.X_OK):
                return path
    return ""


def install_command() -> str:
    """The command that installs a new enough Python here."""
    for manager, command in COMMANDS:
        if find(manager):
            return command
    return "install Python 3.11 or newer from https://www.python.org/downloads/"


def runs(path: str) -> bool:
    """Whether that program is a Python that works and is new enough (a pyenv shim may be neither)."""
    import subprocess

    code = "import sys; sys.exit(0 if sys.version_info >= (3, 11) else 1)"
    try:
        return subprocess.call([path, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) == 0
    except OSError:
        return False


def replace_or_explain() -> int:
    """Run the script under a newer Python if one is on PATH, else say what to install. Returns the exit code."""
    if not os.environ.get(GUARD):
        os.environ[GUARD] = "1"
        for name in NAMES:
            path = find(name)
            if path and runs(path):
                if os.name != "nt":
                    os.execv(path, [path] + sys.argv)
                import subprocess

                return subprocess.call([path] + sys.argv)
    sys.stderr.write(
        "edgellama needs Python 3.11 or newer; this is Python %d.%d (%s).\n    %s\nThen run the same command again.\n"
        % (sys.version_info[0], sys.version_info[1], sys.executable, install_command())
    )
    return 1
