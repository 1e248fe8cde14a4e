"""The `gauntlet` command: a file for each sub-command and its options."""

from llmfoundry_gauntlet.cli.app import main

__all__ = ['main']
