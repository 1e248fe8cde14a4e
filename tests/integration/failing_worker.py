"""A Trainer that fails in an evaluation and is closed at exit, when Python has torn down the modules.

Another Trainer was garbage-collected before, which in Composer 0.32.1 removes the exit hooks of all.

failing_worker.py FOLDER
"""

import gc
import logging
import sys
from pathlib import Path

import tiny
from composer import Callback

from llmfoundry_gauntlet.composer import callback


class Failing(Callback):
    """Raise an error in the middle of an evaluation."""

    def eval_batch_end(self, *_: object) -> None:
        raise ZeroDivisionError


def main(folder: Path) -> None:
    logging.basicConfig(level=logging.WARNING)
    first = tiny.trainer([], max_duration='1ba')
    gauntlet = callback.EvalGauntlet(**tiny.write_tasks(folder), interval='2ba', save_folder=str(folder / 'records'))
    tiny.kept = tiny.trainer([gauntlet, Failing()], max_duration='2ba')  # is there until the end
    del first
    gc.collect()
    tiny.kept.fit()


if __name__ == '__main__':
    main(Path(sys.argv[1]))
