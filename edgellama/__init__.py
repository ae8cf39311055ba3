"""edgellama: an offline LLM runtime for the machine you already have.

Importing this package is cheap: no numba, llama_cpp, textual or fastapi is loaded until a feature needs it.
"""

__version__ = "0.1.0"
