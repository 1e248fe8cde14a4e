"""Data files as checked examples; generators of our own rows."""
