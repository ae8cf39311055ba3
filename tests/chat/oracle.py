"""Renders the conversation grid with transformers and writes what came out, for comparison with edgellama.

A developer's script: it runs in an environment of its own (`pip install transformers jinja2`), never in the project's.

    python tests/chat/oracle.py TEMPLATE.jinja|DIRECTORY... --output FILE.json
"""

from __future__ import annotations

import argparse
import datetime
import json
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("templates", nargs="+", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    import transformers

    grid = json.loads(GRID.read_text(encoding="utf-8"))
    files = [file for path in options.templates for file in (sorted(path.glob("*.jinja")) if path.is_dir() else [path])]
    results: dict = {"made_by": f"transformers {transformers.__version__}", "templates": {}}
    for file in files:
        source = file.read_text(encoding="utf-8")
        outputs = {
            f"{name}{'+prompt' if prompt else ''}": render(source, conversation, grid, add_generation_prompt=prompt)
            for name, conversation in grid["conversations"].items()
            for prompt in (False, True)
        }
        results["templates"][file.stem] = {"source": source, "outputs": outputs}
    options.output.write_text(json.dumps(results, ensure_ascii=False, indent=1), encoding="utf-8")
    print(f"{options.output}: {len(files)} templates x {2 * len(grid['conversations'])} conversations")


if __name__ == "__main__":
    main()
