"""Text to token ids and back from a GGUF file alone: no engine, no native library, ids equal to llama.cpp's."""

from edgellama.engine.tokenizer.tokenizer import GGUFTokenizer, load

__all__ = ["GGUFTokenizer", "load"]
