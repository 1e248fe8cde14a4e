"""Run a script, or with -m a module, in a process in which Composer cannot be imported.

python without_composer.py [-m MODULE | FILE.py] ARGUMENT...
"""

import runpy
import sys


class Blocked:
    """Refuse to import Composer."""

    def find_spec(self, name, path=None, target=None):
        if name.partition('.')[0] == 'composer':
            raise ImportError(f'{name} is blocked')


sys.meta_path.insert(0, Blocked())
is_module = sys.argv[1] == '-m'
sys.argv = sys.argv[2 if is_module else 1 :]
if is_module:
    runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)
else:
    runpy.run_path(sys.argv[0], run_name='__main__')
