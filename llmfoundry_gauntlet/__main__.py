"""The `gauntlet` command as a module, for launchers: `torchrun --nproc-per-node 2 -m llmfoundry_gauntlet run ...`."""

from llmfoundry_gauntlet.cli import main

if __name__ == '__main__':
    main()
