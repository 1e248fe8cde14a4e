"""Score generated programs: program and test run in separate processes, each in a sandbox of its own."""
