"""Benchmarks of `scripts/bench`: one module per name, each with `main(arguments) -> exit code`."""
