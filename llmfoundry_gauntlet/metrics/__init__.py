"""Metrics and composites from item results."""
