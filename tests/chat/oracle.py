"""Renders the conversation grid with transformers and writes what came out, for comparison with edgellama.

A developer's script: it runs in an environment of its own (`pip install transformers jinja2`), never in the project's.

    python tests/chat/oracle.py TEMPLATE.jinja|DIRECTORY... --output FILE.json    every template of a folder
    python tests/chat/oracle.py --vectors                                         data/vectors.json anew
    python tests/chat/oracle.py --compare FILE.json    (in the project's environment) edgellama against such a file
"""

# ruff: noqa: T201, BLE001  (a script that prints, and records whatever a template raises)
from __future__ import annotations

import argparse
import collections
import datetime
import hashlib
import json
import runpy
import sys
import warnings
from pathlib import Path

GRID = Path(__file__).parent / "data" / "conversations.json"


def render(source: str, conversation: dict, grid: dict, *, add_generation_prompt: bool) -> dict:
    """`{"text": …}` or `{"error": …}` of one template and one conversation."""
    from transformers.utils import chat_template_utils as oracle

    fixed = datetime.datetime.fromisoformat(grid["now"])

    class Clock(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return fixed

    oracle.datetime = Clock
    arguments = {"bos_token": grid["bos_token"], "eos_token": grid["eos_token"], **conversation.get("arguments", {})}
    try:
        rendered, _ = oracle.render_jinja_template(
            conversations=[conversation["messages"]],
            tools=conversation.get("tools"),
            chat_template=source,
            add_generation_prompt=add_generation_prompt,
            **arguments,
        )
    except Exception as error:  # whatever a template raises is a result here
        return {"error": f"{type(error).__name__}: {error}"}
    return {"text": rendered[0]}


FAMILY_CONVERSATIONS = ("user", "system-turns", "unicode", "whitespace", "control-text", "system-middle")


def rendered(source: str, grid: dict, names: list[str]) -> dict:
    """Outputs of one template by conversation, with and without a generation prompt."""
    return {
        f"{name}{'+prompt' if prompt else ''}": render(
            source, grid["conversations"][name], grid, add_generation_prompt=prompt
        )
        for name in names
        for prompt in (False, True)
    }


def shortened(outputs: dict) -> dict:
    """Long texts as their SHA-256, to keep the committed file small."""
    return {
        key: {"sha256": hashlib.sha256(found["text"].encode()).hexdigest()}
        if len(found.get("text", "")) > 300
        else found
        for key, found in outputs.items()
    }


def families() -> dict[str, str]:
    """The family templates, from the file itself: the package is not installed here."""
    path = Path(__file__).parents[2] / "edgellama" / "chat" / "fallback.py"
    return dict(runpy.run_path(str(path))["FAMILIES"])


def compare(path: Path) -> None:
    """Render with edgellama what the file has, and say how often it is equal."""
    from edgellama.chat.templates import ChatTemplate
    from edgellama.errors import EdgellamaError

    grid = json.loads(GRID.read_text(encoding="utf-8"))
    now = datetime.datetime.fromisoformat(grid["now"])
    counts: collections.Counter[str] = collections.Counter()
    data = json.loads(path.read_text(encoding="utf-8"))
    for name, entry in data["templates"].items():
        template = ChatTemplate(
            entry["source"], bos_text=grid["bos_token"], eos_text=grid["eos_token"], now=lambda: now
        )
        for key, wanted in entry["outputs"].items():
            conversation = grid["conversations"][key.removesuffix("+prompt")]
            try:
                found = template.render_dicts(
                    conversation["messages"],
                    tools=conversation.get("tools"),
                    arguments=conversation.get("arguments"),
                    add_generation_prompt=key.endswith("+prompt"),
                )
            except EdgellamaError as error:
                found = error
            both_failed = isinstance(found, EdgellamaError) and "error" in wanted
            verdict = "both raise" if both_failed else "equal" if found == wanted.get("text", found) else "differ"
            if isinstance(found, EdgellamaError) != ("error" in wanted):
                verdict = "differ"
            counts[verdict] += 1
            if verdict == "differ":
                print(f"{name}, {key}:\n  transformers: {wanted!r:.300}\n  edgellama:    {found!r:.300}")
    print(f"{data['made_by']}: {len(data['templates'])} templates, {dict(counts)}")
    sys.exit(1 if counts["differ"] else 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("templates", nargs="*", type=Path)
    parser.add_argument("--output", type=Path, default=GRID.parent / "vectors.json")
    parser.add_argument("--vectors", action="store_true")
    parser.add_argument("--compare", type=Path)
    options = parser.parse_args()
    if options.compare:
        compare(options.compare)
    warnings.simplefilter("ignore")
    import transformers

    grid = json.loads(GRID.read_text(encoding="utf-8"))
    folders = [GRID.parent / "templates"] if options.vectors else options.templates
    files = [file for path in folders for file in (sorted(path.glob("*.jinja")) if path.is_dir() else [path])]
    wanted = {file.stem: (file.read_text(encoding="utf-8"), list(grid["conversations"])) for file in files}
    if options.vectors:
        wanted |= {name: (source, list(FAMILY_CONVERSATIONS)) for name, source in families().items()}
    results = {
        "made_by": f"transformers {transformers.__version__}",
        "templates": {
            name: {"outputs": shortened(rendered(source, grid, names))}
            if options.vectors
            else {"source": source, "outputs": rendered(source, grid, names)}
            for name, (source, names) in wanted.items()
        },
    }
    options.output.write_text(json.dumps(results, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    print(f"{options.output}: {len(wanted)} templates")


if __name__ == "__main__":
    main()
