"""The `gauntlet` command: one module per subcommand."""

from llmfoundry_gauntlet.cli.app import main

__all__ = ['main']
