"""The `gauntlet` command, for tests of what it writes, prints, returns and loads."""

from __future__ import annotations

import logging
import subprocess
import sys
from typing import Any

import pytest

from llmfoundry_gauntlet.cli.app import main


def run_cli(*arguments: Any) -> int:
    """Runs `gauntlet` with these words; its exit status. What is logged afterwards is as before."""
    log = logging.getLogger('llmfoundry_gauntlet')
    level = log.level
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, 'argv', ['gauntlet', *map(str, arguments)])
        try:
            main()
        except SystemExit as end:
            return int(end.code or 0)
        finally:
            log.setLevel(level)
    return 0


def loaded_by(*arguments: Any, names: tuple[str, ...] = ('torch', 'composer', 'transformers', 'datasets')) -> list[str]:
    """Which of these packages `gauntlet` loads with these words, which must go well, in a process of its own."""
    script = (
        'import sys\n'
        'from llmfoundry_gauntlet.cli.app import main\n'
        'try:\n'
        '    main()\n'
        'except SystemExit as end:\n'
        '    assert not end.code, end.code\n'
        f'sys.exit(" ".join(name for name in {names!r} if name in sys.modules) or "-")\n'
    )
    done = subprocess.run([sys.executable, '-c', script, *map(str, arguments)], capture_output=True, text=True)
    *_, last = done.stderr.splitlines()
    return [] if last == '-' else last.split()
