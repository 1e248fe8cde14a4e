"""Score generated programs: completion and test run in separate processes, each in its own sandbox."""
