"""Tasks, gauntlets and settings from YAML into frozen dataclasses."""
