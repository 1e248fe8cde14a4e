"""Worker processes of comparisons: limits, end, and forbidden names."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from llmfoundry_gauntlet.scoring.mathematics import Comparer, ComparisonError, ComparisonLimits

BOMBS = ('9^{9^{9^9}}', '99999999999!', r'\sum_{n=1}^{10^{9}} \frac{1}{n^n}')
NESTED = ('(' * 400 + '1' + ')' * 400, r'\sqrt{' * 150 + '2' + '}' * 150, '{' * 500, r'\frac{1}{' * 120, '\\' * 999)
QUICK = ComparisonLimits(seconds=1, reference_seconds=2, step_seconds=0.5, processes=1)


@pytest.fixture
def comparer() -> Iterator[Comparer]:
    with closing(Comparer(QUICK)) as comparer:
        comparer.equal('x+1', '1+x')
        yield comparer


def descendants(pid: int) -> list[int]:
    """Return the living processes below a process."""
    found = []
    for stat in Path('/proc').glob('[0-9]*/stat'):
        try:
            _, _, fields = stat.read_text().rpartition(')')
        except OSError:
            continue
        if int(fields.split()[1]) == pid and fields.split()[0] != 'Z':
            found += [int(stat.parent.name), *descendants(int(stat.parent.name))]
    return found


def worker_of(comparer: Comparer) -> int:
    """Return the process of a comparer's only worker."""
    (worker,) = comparer._workers.values()
    return worker.process.pid


def wait_until(what: object, seconds: float = 20) -> bool:
    deadline = time.monotonic() + seconds
    while not what() and time.monotonic() < deadline:
        time.sleep(0.05)
    return what()


@pytest.mark.parametrize('bomb', BOMBS)
def test_an_endless_comparison_ends_at_its_limit(comparer: Comparer, bomb: str):
    begin = time.monotonic()
    assert not comparer.equal(bomb, 'x+1')
    assert not comparer.equal(bomb, '2', reference=True)
    assert time.monotonic() - begin < 20  # 3 s of CPU time, on a machine that may be busy
    assert comparer.equal('(x+1)^2', 'x^2+2x+1')


@pytest.mark.parametrize('text', NESTED)
def test_deep_nesting_is_not_equal(comparer: Comparer, text: str):
    assert not comparer.equal(text, '7x')
    assert not comparer.equal(text, '7', reference=True)


def test_a_comparison_that_hangs_does_not_slow_later_ones(comparer: Comparer):
    comparer.equal(BOMBS[0], 'x+1')
    process = worker_of(comparer)
    begin = time.monotonic()
    assert comparer.equal('x(x+1)', 'x^2+x')
    assert time.monotonic() - begin < 10
    assert worker_of(comparer) == process
    assert descendants(process) == []


def test_results_do_not_depend_on_earlier_comparisons():
    pairs = [
        ('x(x+1)', 'x^2+x'),
        (BOMBS[0], 'x'),
        (r'\sin 2x', r'2\sin x\cos x'),
        (BOMBS[1], '5'),
        ('x', 'y'),
    ]

    with closing(Comparer(QUICK)) as comparer:
        in_order = comparer.equal_many(pairs)
    with closing(Comparer(QUICK)) as comparer:
        backwards = [comparer.equal(*pair) for pair in reversed(pairs)]

    assert in_order == [True, False, True, False, False]
    assert backwards == in_order[::-1]


def test_wall_time_is_limited():
    with closing(Comparer(ComparisonLimits(seconds=60, wall_seconds=1))) as comparer:
        comparer.equal('x+1', '1+x')
        begin = time.monotonic()
        assert not comparer.equal(BOMBS[0], 'x+1')
        assert time.monotonic() - begin < 10


def test_memory_is_limited():
    program = (
        'import resource\n'
        'from llmfoundry_gauntlet.scoring.mathematics import Comparer\n'
        'comparer = Comparer()\n'
        'print(comparer.equal(\'len("a" * (6 * 10**9))\', "5", reference=True))\n'
        'comparer.close()\n'
        'print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024)\n'
    )
    done = subprocess.run([sys.executable, '-c', program], capture_output=True, text=True, check=True)
    outcome, most_mib = done.stdout.split()
    assert outcome == 'False'
    assert int(most_mib) < 1100


def test_closing_ends_workers_and_comparisons(comparer: Comparer):
    process = worker_of(comparer)
    with ThreadPoolExecutor() as threads:
        running = threads.submit(comparer.equal, BOMBS[1], 'y')
        assert wait_until(lambda: descendants(process))
        comparer.close()
        assert not os.path.exists(f'/proc/{process}')
        with pytest.raises(ComparisonError):
            running.result()
    assert comparer._workers == {}
    assert comparer.equal('2x+x', '3x')


def test_a_collected_comparer_ends_its_worker():
    comparer = Comparer(QUICK)
    comparer.equal('x+1', '1+x')
    process = worker_of(comparer)
    del comparer
    gc.collect()
    assert not os.path.exists(f'/proc/{process}')


def test_workers_die_with_their_parent():
    program = (
        'from llmfoundry_gauntlet.scoring.mathematics import Comparer\n'
        'comparer = Comparer()\n'
        'comparer.equal("x+1", "1+x")\n'
        'print([*comparer._workers.values()][0].process.pid, flush=True)\n'
        f'comparer.equal({BOMBS[0]!r}, "x")\n'
    )
    asking = subprocess.Popen([sys.executable, '-c', program], stdout=subprocess.PIPE, text=True)
    worker = int(asking.stdout.readline())
    assert wait_until(lambda: descendants(worker))
    forks = descendants(worker)
    asking.kill()
    asking.communicate()
    assert wait_until(lambda: not any(os.path.exists(f'/proc/{pid}') for pid in (worker, *forks)), 4)


def test_workers_die_with_their_parent_if_a_fork_keeps_the_pipe_open():
    """A forked data loader worker inherits the pipe and may outlive the training job."""
    program = (
        'import os, time\n'
        'from llmfoundry_gauntlet.scoring.mathematics import Comparer\n'
        'comparer = Comparer()\n'
        'comparer.equal("x+1", "1+x")\n'
        'fork = os.fork()\n'
        'if fork == 0:\n'
        '    os.close(1)\n'
        '    time.sleep(60)\n'
        'print([*comparer._workers.values()][0].process.pid, fork, flush=True)\n'
        'time.sleep(60)\n'
    )
    asking = subprocess.Popen([sys.executable, '-c', program], stdout=subprocess.PIPE, text=True)
    worker, fork = map(int, asking.stdout.readline().split())
    asking.kill()
    asking.communicate()
    try:
        assert wait_until(lambda: not os.path.exists(f'/proc/{worker}'), 8)
    finally:
        os.kill(fork, signal.SIGKILL)


def test_a_fork_does_not_end_the_worker_of_its_parent(comparer: Comparer):
    process = worker_of(comparer)
    fork = os.fork()
    if fork == 0:
        comparer.close()
        os._exit(0)
    os.waitpid(fork, 0)
    assert os.path.exists(f'/proc/{process}')
    assert comparer.equal('2(x+1)', '2x+2')


def test_a_killed_worker_is_restarted(comparer: Comparer):
    os.kill(worker_of(comparer), signal.SIGKILL)
    assert comparer.equal('3(x+1)', '3x+3')
    killed = worker_of(comparer)
    threading.Timer(0.3, os.kill, (killed, signal.SIGKILL)).start()
    assert not comparer.equal(BOMBS[0], 'x')
    assert worker_of(comparer) != killed


def test_threads_may_share_a_comparer(comparer: Comparer):
    outcomes: dict[int, bool] = {}

    def compare(number: int) -> None:
        outcomes[number] = comparer.equal(f'{number}(x+1)', f'{number}x+{number if number % 2 else 1}')

    threads = [threading.Thread(target=compare, args=(number,)) for number in range(2, 12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes == {number: bool(number % 2) for number in range(2, 12)}


@pytest.mark.parametrize(
    'text',
    [
        '__import__("os").system("touch {}")',
        'exec("import os; os.system(\'touch {}\')")',
        "sympify(\"__import__('os').system('touch {}')\")",
        'S("_" + "_import_" + "_(\'os\').system(\'touch {}\')")',
        'open("{}", "w")',
        "lambdify((), \"__import__('os').system('touch {}')\")()",
        '().__class__.__bases__[0].__subclasses__()',
        'fcode(x, assign_to="{}")',
    ],
)
def test_the_reference_parser_runs_no_python_of_a_generation(comparer: Comparer, tmp_path: Path, text: str):
    made = tmp_path / 'made'
    assert not comparer.equal(text.replace('{}', str(made)), '5', reference=True)
    assert not made.exists()


def test_missing_math_verify_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / 'math_verify.py').write_text('raise ImportError("no math_verify here")')
    monkeypatch.syspath_prepend(tmp_path)
    missing = pytest.raises(ComparisonError, match='needs math-verify and sympy: no math_verify')
    with closing(Comparer()) as comparer, missing:
        comparer.equal('x+1', '1+x')


def test_a_text_that_exceeded_a_limit_twice_is_not_compared_again(comparer: Comparer):
    """Otherwise a few huge generations, each compared with all others, would hold up a training job for hours."""
    monster = r'\sum_{n=1}^{10^{9}} \frac{\sin(n)}{n^{0}}'
    comparer.equal_many([(monster, 'x'), (monster, 'y')])
    begin = time.monotonic()
    assert comparer.equal_many([(monster, f'x+{number}') for number in range(20)]) == [False] * 20
    assert time.monotonic() - begin < 0.9  # a single comparison would take a second of CPU time
    assert comparer.equal('x+2', '2+x')
