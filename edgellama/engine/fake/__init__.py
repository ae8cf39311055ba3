"""A scripted engine without a model: tests, demos and the safety ladder's fire drill.

`load(path, options)` takes a JSON script (`NAME.fake.json`); see `script.py` for the format. Vocabulary and logits are
small and predictable, the bookkeeping of sequences is real, and faults (crashes, hangs, wrong numbers) strike where the
script says.
"""

from edgellama.engine.fake.engine import FakeEngine, load
from edgellama.engine.fake.script import Answer, Fault, Script, read_script, write_script

__all__ = ["Answer", "FakeEngine", "Fault", "Script", "load", "read_script", "write_script"]
