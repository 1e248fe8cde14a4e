"""Data files: manifest, download, checks, readers."""
