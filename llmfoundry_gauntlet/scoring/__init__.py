"""Scorers: an output and a gold become a score."""
