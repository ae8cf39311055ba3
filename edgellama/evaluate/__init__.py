"""Perplexity, KL divergence and importance matrices: an engine in a process of its own reads a text and is measured."""
