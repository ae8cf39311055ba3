"""`edgellama doctor`: checks this machine and says what to change."""

from __future__ import annotations

from collections import Counter

import click

from edgellama.cli.common import Output, command

_MARKS = {"ok": "ok", "warn": "warn", "fail": "FAIL", "unknown": "?"}


@command(example="edgellama doctor --json", uses_settings=False)
@click.option("--forget", is_flag=True, help="Delete the safety ladder's verdicts, so that models are checked anew.")
def doctor(out: Output, *, forget: bool) -> int:
    """Check this machine and say what to change.

    Reports the machine, memory, disk, processor, the native library and its devices, the safety ladder's verdicts,
    sensors and the network settings. The exit code is 0 when nothing fails (warnings included), 1 when a check fails.
    """
    from edgellama.cli import doctor_checks

    if forget:
        return _forget(out)
    checks = []
    for check in doctor_checks.all_checks():
        checks.append(check)
        if not out.json and not (out.quiet and check.status in {"ok", "unknown"}):
            out.line(f"{_MARKS[check.status]:<4}  {check.name}: {check.value}")
            if check.advice:
                for line in check.advice.splitlines():
                    out.line(f"      -> {line}")
    if out.json:
        out.object(
            {"checks": [{"name": c.name, "status": c.status, "value": c.value, "advice": c.advice} for c in checks]}
        )
    else:
        count = Counter(check.status for check in checks)
        out.notice(f"{count['fail']} failed, {count['warn']} warnings, {count['unknown']} unknown, {count['ok']} good")
    return 1 if any(check.status == "fail" for check in checks) else 0


def _forget(out: Output) -> int:
    from edgellama import paths
    from edgellama.engine.verdicts import Verdicts

    count = Verdicts(paths.cache_dir()).forget()
    if out.json:
        out.object({"forgotten": count})
    else:
        out.line(f"{count} safety {'verdict' if count == 1 else 'verdicts'} deleted; models are checked anew")
    return 0


command = doctor
