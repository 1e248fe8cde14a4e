"""Load tasks, gauntlets and settings from YAML into frozen dataclasses."""
