"""The files that a run writes."""
