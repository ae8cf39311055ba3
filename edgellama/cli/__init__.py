"""The command line: one file per command, imported only when called. The only place that wires the rooms together."""
