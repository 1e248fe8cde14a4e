"""Metrics and composites from item results: numbers only."""
