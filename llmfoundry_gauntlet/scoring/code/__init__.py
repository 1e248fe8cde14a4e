"""Marks generated programs: each is run against its test, the two apart, each in a sandbox of its own."""
