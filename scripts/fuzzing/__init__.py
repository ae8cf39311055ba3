"""Parts of scripts/fuzz_gguf."""
