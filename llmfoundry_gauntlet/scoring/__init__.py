"""Scorers: turn a model's output and the gold into a score."""
