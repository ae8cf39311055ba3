"""Sensors and memory readers: unknown is a value, a missing sensor never raises."""
