"""Tokens in, logits out. Engines are chosen by the worker; nothing here imports one."""
