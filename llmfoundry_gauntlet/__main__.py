"""The `gauntlet` command as a module: `composer -n 2 -m llmfoundry_gauntlet watch ...` runs it on several ranks."""

from llmfoundry_gauntlet.cli import main

if __name__ == '__main__':
    main()
