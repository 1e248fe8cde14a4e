"""From an output and a gold to a credit."""
