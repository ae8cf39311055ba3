"""Requests in, typed events out."""
