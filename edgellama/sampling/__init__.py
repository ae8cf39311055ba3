"""Logits in, token out."""
