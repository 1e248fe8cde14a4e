"""Hostile completions: each fails and leaves nothing behind, and the next item is scored as usual.

The right answer is a word that a program can only have by breaking out, so a successful attack passes its own test and
fails this one. Each attack is bounded in itself and aims at objects of the test. They share one long file because some
tests try each in every language and sandbox.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from programs import CPP, JAVASCRIPT, PYTHON, SECRET, problem, right, sandbox

from llmfoundry_gauntlet.scoring.code.execution import check_completion
from llmfoundry_gauntlet.scoring.code.sandbox import LATE, Command, try_out

SECONDS = 4.0  # for each, so that the endless ones end
ENDED = 60.0  # by when a late program was killed, also on a busy machine
MARK = 'gauntlet_attack_5521'  # in the names of processes and files that attacks make
DEFAULT, PLAIN_USER, WHEELS = 'default', 'plain user', 'wheels'


@pytest.fixture(
    autouse=True,
    params=[DEFAULT, pytest.param(PLAIN_USER, marks=pytest.mark.slow), pytest.param(WHEELS, marks=pytest.mark.slow)],
)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run every attack as sandboxes run here, as a plain user, and with the tools that Python packages bring."""
    if request.param == WHEELS:
        request.getfixturevalue('only_wheels')
    if request.param == PLAIN_USER:
        default = sandbox()
        plain = replace(default, as_root=False)
        if plain == default:
            pytest.skip('is the default')
        if (reason := try_out(plain)) is not None:
            pytest.skip(f'cannot be used here: {reason}')
        monkeypatch.setattr(sys.modules[__name__], 'sandbox', lambda: plain)


def body(text: str) -> str:
    """Return the indented lines of a Python function's body."""
    return ''.join(f'    {line}\n' for line in text.strip().splitlines())


ONE_PROCESS = {
    'fork bomb': """
import os
for _ in range(40):
    os.fork()
return '{secret_is_not_here}'
""",
    'fork': """
import os
return 'FORKED' if os.fork() >= 0 else ''
""",
    'subprocess': """
import subprocess
return subprocess.run(['/bin/echo', '-n', 'FORKED'], capture_output=True, text=True).stdout
""",
    'posix_spawn': """
import os
pid = os.posix_spawn('/bin/true', ['true'], {})
return 'FORKED'
""",
    'multiprocessing': """
import multiprocessing
process = multiprocessing.Process(target=print)
process.start()
return 'FORKED'
""",
}


@pytest.mark.parametrize('name', ONE_PROCESS)
def test_a_program_is_one_process(name: str):
    outcome = check_completion(problem(PYTHON, 'FORKED'), body(ONE_PROCESS[name]), sandbox(), seconds=SECONDS)
    assert not outcome.passed and 'in a call' in outcome.reason
    assert_unharmed(PYTHON)


COSTS = {
    'memory bomb': ("block = bytearray(3 * 2**30)\nreturn 'GOT'", 'MemoryError in a call'),
    'memory by pieces': (
        "kept = []\nfor _ in range(3000):\n    kept.append(bytes(2**20))\nreturn 'GOT'",
        'MemoryError',
    ),
    'shared memory': (
        "import mmap\nkept = [mmap.mmap(-1, 2**28) for _ in range(12)]\nreturn 'GOT'",
        'OSError in a call',
    ),
    'endless loop': ('while True:\n    pass', LATE),
    'sleep': ("import time\ntime.sleep(60)\nreturn 'GOT'", LATE),
    'stopped': ('import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)', LATE),
    'output': (
        "import sys\nfor _ in range(20000):\n    print('x' * 1000)\nsys.stderr.write('y' * 10**6)\nreturn 'no'",
        'result',
    ),
    'deep recursion': (
        'import sys\nsys.setrecursionlimit(10**7)\ndef deeper(n):\n    return deeper(n + 1) + 1\nreturn deeper(0)',
        '',
    ),
    'threads': (
        'import threading, time\nfor _ in range(300):\n'
        "    threading.Thread(target=time.sleep, args=(5,), daemon=True).start()\nreturn 'GOT'",
        'RuntimeError in a call',
    ),
    'open files': ("kept = [open('/dev/null') for _ in range(500)]\nreturn 'GOT'", 'OSError in a call'),
    'full disk': (
        "kept = [open(f'/tmp/{index}', 'wb') for index in range(50)]\nfor stream in kept:\n"
        "    for _ in range(30):\n        stream.write(bytes(2**20))\n    stream.flush()\nreturn 'GOT'",
        'OSError in a call',
    ),
    'a large file': ("open('/tmp/one', 'wb').write(bytes(40 * 2**20))\nreturn 'GOT'", ''),
    'a long number': ('return str(7 ** (7 ** 9))', ''),
    'a large result': ("return 'x' * (200 * 2**20)", 'no plain value'),
}


@pytest.mark.parametrize('name', COSTS)
def test_a_program_has_limits(name: str):
    code, reason = COSTS[name]
    seconds = SECONDS if reason == LATE else 5 * SECONDS  # on a busy machine the others are slow too
    started = time.monotonic()
    outcome = check_completion(problem(PYTHON, 'GOT'), body(code), sandbox(), seconds=seconds)
    assert not outcome.passed and reason in outcome.reason
    assert time.monotonic() - started < ENDED
    assert_unharmed(PYTHON)


READS = {
    'a file': 'return open({path!r}).read()',
    'the home folder': "import os\nreturn open(os.path.expanduser('~' + {user!r}) + '/..' + {path!r}).read()",
    'a symbolic link': "import os\nos.symlink({path!r}, '/tmp/link')\nreturn open('/tmp/link').read()",
    'a hard link': "import os\nos.link({path!r}, '/tmp/link')\nreturn open('/tmp/link').read()",
    'the root of process 1': "return open('/proc/1/root' + {path!r}).read()",
    'its own root': "return open('/proc/self/root' + '/..' + {path!r}).read()",
    'a working directory': "return open('/proc/1/cwd/' + '../' * 9 + {path!r}).read()",
    'the environment': "import os\nreturn os.environ['GAUNTLET_TEST_SECRET']",
    "process 1's environment": (
        "text = open('/proc/1/environ').read()\nreturn text.split('GAUNTLET_TEST_SECRET=')[1].split('\\0')[0]"
    ),
    "every process's memory of files": (
        "import glob, os\nfor name in glob.glob('/proc/[0-9]*/fd/*'):\n    try:\n"
        '        text = os.read(os.open(name, os.O_RDONLY | os.O_NONBLOCK), 10**6).decode(errors="replace")\n'
        '    except OSError:\n        continue\n'
        '    if {secret_head!r} + "9" in text:\n'
        '        return {secret_head!r} + text.split({secret_head!r})[1][:4]\nreturn None'
    ),
    'the test in memory': (
        'import gc\nfor thing in gc.get_objects():\n    text = str(thing)[:10**5]\n'
        '    if {secret_head!r} + "9" in text:\n'
        '        return {secret_head!r} + text.split({secret_head!r})[1][:4]\nreturn None'
    ),
    'the test on disk': (
        "import os\nfor top in ('/gauntlet', '/tmp', '/etc', '/run', '/home', '/root', '/var'):\n"
        '    for folder, _, names in os.walk(top):\n        for name in names[:200]:\n            try:\n'
        "                with open(os.path.join(folder, name), errors='replace') as stream:\n"
        '                    text = stream.read(10**5)\n            except OSError:\n                continue\n'
        '            if {secret_head!r} + "9" in text:\n'
        '                return {secret_head!r} + text.split({secret_head!r})[1][:4]\nreturn None'
    ),
    'ptrace': (
        'import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n'
        'traced = [libc.ptrace(16, process, 0, 0) for process in range(1, 40)]\n'
        'return {secret!r} if 0 in traced else None'
    ),
    'a mount': (
        'import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n'
        "done = libc.unshare(0x10000000) == 0 or libc.mount(b'proc', b'/tmp', b'proc', 0, None) == 0\n"
        'return {secret!r} if done else None'
    ),
}


@pytest.mark.parametrize('name', READS)
def test_a_program_sees_no_files_of_the_user(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv('GAUNTLET_TEST_SECRET', SECRET)
    path = tmp_path / 'secret'
    path.write_text(SECRET)
    code = READS[name].format(path=str(path), user='', secret=SECRET, secret_head='the-word-')
    outcome = check_completion(problem(PYTHON), body(code), sandbox(), seconds=100)
    assert not outcome.passed and 'in time' not in outcome.reason
    assert_unharmed(PYTHON)


@pytest.mark.parametrize(
    'code',
    [
        "open({path!r}, 'w').write('x')",
        'import os\nos.mkdir({path!r})',
        "import os\nos.symlink('/tmp', {path!r})",
        'import os\nos.rename({present!r}, {path!r})',
        'import os\nos.remove({present!r})',
        'import shutil\nshutil.rmtree({folder!r}, ignore_errors=True)',
        "open('/proc/1/root' + {path!r}, 'w').write('x')",
        "open('/gauntlet/python_runner.py', 'a').write('x')",
        "import sys\nopen(sys.executable, 'a').write('x')",
    ],
)
def test_a_program_writes_nothing_outside(code: str, tmp_path: Path):
    present = tmp_path / 'present'
    present.write_text('here')
    path = tmp_path / 'written'
    text = code.format(path=str(path), present=str(present), folder=str(tmp_path)) + "\nreturn 'DONE'"
    outcome = check_completion(
        problem(PYTHON, 'DONE' if 'rmtree' not in code else 'never'), body(text), sandbox(), seconds=SECONDS
    )
    assert not outcome.passed
    assert present.read_text() == 'here' and sorted(tmp_path.iterdir()) == [present]
    assert_unharmed(PYTHON)


@pytest.fixture
def server() -> Iterator[int]:
    """Return a port of this machine that serves the word."""
    listening = socket.create_server(('127.0.0.1', 0))

    def answer() -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            connection.sendall(SECRET.encode())
            connection.close()

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    yield listening.getsockname()[1]
    listening.close()


def test_a_program_has_no_network(server: int):
    with socket.create_connection(('127.0.0.1', server)) as reached:
        assert reached.recv(100).decode() == SECRET
    code = f"import socket\nline = socket.create_connection(('127.0.0.1', {server}), 2)\nreturn line.recv(100).decode()"
    outcome = check_completion(problem(PYTHON), body(code), sandbox(), seconds=SECONDS)
    assert not outcome.passed and 'Error in a call' in outcome.reason


@pytest.mark.parametrize('kind', ['abstract', 'file'])
def test_a_program_reaches_no_socket_of_this_machine(kind: str, tmp_path: Path):
    address = f'\0{MARK}{os.getpid()}' if kind == 'abstract' else str(tmp_path / 's')
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(address)
        listening.listen()
        code = f"import socket\nline = socket.socket(socket.AF_UNIX)\nline.connect({address!r})\nreturn 'DONE'"
        assert not check_completion(problem(PYTHON, 'DONE'), body(code), sandbox(), seconds=SECONDS).passed


@pytest.mark.parametrize('family', ['socket.AF_INET', 'socket.AF_INET6', 'socket.AF_NETLINK', '40'])
def test_only_unix_sockets_exist(family: str):
    """Number 40 is vsock, which network namespaces do not block."""
    code = f"import socket\nsocket.socket({family}, socket.SOCK_STREAM)\nreturn 'DONE'"
    outcome = check_completion(problem(PYTHON, 'DONE'), body(code), sandbox(), seconds=SECONDS)
    assert outcome.reason == 'OSError in a call'


@pytest.mark.parametrize('path', ['/proc/1/fd/2', '/proc/1/mem', '/proc/sys/kernel/core_pattern', '/proc/self/oom_adj'])
@pytest.mark.parametrize('as_root', [True, False])
def test_proc_is_read_only(path: str, as_root: bool):
    """Also if bubblewrap's own process has the program's user, so that no item becomes unscored."""
    way = sandbox()
    if as_root != way.as_root and try_out(replace(way, as_root=as_root)) is not None:
        pytest.skip('bubblewrap cannot be called in this way here')
    code = f"open({path!r}, 'r+').write('x')\nreturn 'DONE'"
    assert not check_completion(
        problem(PYTHON, 'DONE'), body(code), replace(way, as_root=as_root), seconds=SECONDS
    ).passed


def test_node_loads_no_native_addons():
    code = (
        "  require('fs').writeFileSync('/tmp/x.node', 'x')\n"
        "  process.dlopen({exports: {}}, '/tmp/x.node')\n  return ''\n}\n"
    )
    outcome = check_completion(problem(JAVASCRIPT, ''), code, sandbox(), seconds=SECONDS)
    assert not outcome.passed and 'in a call' in outcome.reason


def test_stopping_during_set_up_leaves_no_process():
    """Its parent has not yet asked to die with it."""
    command = Command(arguments=('sleep', '61.5521'))
    for pause in range(40):
        running = sandbox().start(command)
        time.sleep(pause / 8000)
        running.stop()
    time.sleep(0.2)
    assert not [line for line in command_lines() if '61.5521' in line]


def command_lines() -> Iterator[str]:
    """Return the command lines of all visible processes."""
    for path in Path('/proc').glob('[0-9]*/cmdline'):
        try:
            yield path.read_text(errors='replace')
        except OSError:
            continue


@pytest.mark.parametrize('target', ['os.getppid()', '1', '-1', '0', 'os.getpid()', '{scorer}', '{parent}'])
def test_signals_reach_no_other_process(target: str):
    target = target.format(scorer=os.getpid(), parent=os.getppid())
    code = f"import os\ntry:\n    os.kill({target}, 9)\nexcept OSError:\n    pass\nreturn 'no'"
    outcome = check_completion(problem(PYTHON), body(code), sandbox(), seconds=SECONDS)
    assert not outcome.passed and outcome.reason != LATE
    assert_unharmed(PYTHON)


def test_nothing_outlives_a_program(tmp_path: Path):
    code = f"""
import ctypes, os, threading, time
ctypes.CDLL(None).prctl(15, b'{MARK[:15]}', 0, 0, 0)
threading.Thread(target=time.sleep, args=(60,)).start()
try:
    os.setsid()
except OSError:
    pass
try:
    if os.fork() == 0:
        time.sleep(60)
except OSError:
    pass
return 'no'
"""
    before = set(Path('/tmp').glob('*'))
    assert not check_completion(problem(PYTHON), body(code), sandbox(), seconds=SECONDS).passed
    deadline = time.monotonic() + 20
    while (left := [name for name in process_names() if name == MARK[:15]]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left
    assert {path for path in set(Path('/tmp').glob('*')) - before if 'gauntlet' in path.name} == set()


def process_names() -> Iterator[str]:
    """Return the names of all visible processes."""
    for path in Path('/proc').glob('[0-9]*/comm'):
        try:
            yield path.read_text().strip()
        except OSError:
            continue


FAKES = {
    (PYTHON, 'equals everything'): """
class Same:
    def __eq__(self, other):
        return True
    __hash__ = None
return Same()
""",
    (PYTHON, 'a string that equals everything'): """
class Same(str):
    def __eq__(self, other):
        return True
    def __hash__(self):
        return 0
return Same('x')
""",
    (PYTHON, 'exit'): 'import sys\nsys.exit(0)',
    (PYTHON, 'exit at once'): 'import os\nos._exit(0)',
    (PYTHON, 'words'): 'print(\'{"passed": true, "reason": null}\')\nreturn "passed"',
    (PYTHON, 'words into every descriptor'): """
import os
for number in range(64):
    try:
        os.write(number, b'{"passed": true, "reason": null}\\n')
    except OSError:
        pass
os._exit(0)
""",
    (PYTHON, 'answers in advance'): """
import os
for number in range(3, 64):
    try:
        os.write(number, b'{"value": {"__class__": "x"}}\\n' * 5)
    except OSError:
        pass
return 'no'
""",
    (PYTHON, 'replaced built-ins'): """
import builtins, json, sys
builtins.AssertionError = type('Quiet', (Exception,), {})
builtins.isinstance = lambda *_: True
json.dumps = lambda message: '{"passed": true, "reason": null}'
sys.modules['json'].loads = lambda text: {'value': None}
return 'no'
""",
    (PYTHON, "the runner's own frames"): """
import sys
frame = sys._getframe()
while frame:
    for value in list(frame.f_locals.values()):
        if hasattr(value, 'write'):
            value.write(b'{"passed": true, "reason": null}\\n')
    frame = frame.f_back
return 'no'
""",
    (PYTHON, 'an answer that is no JSON'): """
import os
for number in range(3, 64):
    try:
        os.write(number, b'[' * 100000 + b'\\n')
    except OSError:
        pass
""",
    (CPP, 'equals everything'): """  return "";
}
template <class T> bool operator==(const string&, const T&) { return true; }
bool operator==(const string&, const char*) { return true; }
""",
    (CPP, 'macros'): """#define assert(x) ((void)0)
#define return return string("x");
#define main other
  return "";
}
""",
    (CPP, 'exit'): """  exit(0);
}
""",
    (CPP, 'exit before main'): """  return "";
}
struct Early { Early() { _Exit(0); } } early;
""",
    (CPP, 'a main of its own'): """  return "";
}
int main() { return 0; }
""",
    (CPP, 'abort is replaced'): """  return "";
}
extern "C" void abort() { _Exit(0); }
extern "C" void __assert_fail(const char*, const char*, unsigned, const char*) noexcept { _Exit(0); }
""",
    (
        CPP,
        'bytes into every descriptor',
    ): """  for (int number = 3; number < 64; ++number) write(number, "\\xff\\xff\\xff\\xff\\xff\\xff\\xff\\x7f", 8);
  _exit(0);
}
""",
    (
        JAVASCRIPT,
        'equals everything',
    ): "  return {valueOf: () => 'x', toString: () => 'x', toJSON: () => 'x', [Symbol.toPrimitive]: () => 'x'}\n}\n",
    (JAVASCRIPT, 'exit'): '  process.exit(0)\n}\n',
    (
        JAVASCRIPT,
        'console.assert',
    ): "  console.assert = () => {}\n  globalThis.console = {assert() {}}\n  return 'no'\n}\n",
    (JAVASCRIPT, 'prototypes'): """  String.prototype.valueOf = () => 'x'
  Object.prototype.passed = true
  JSON.stringify = () => '{"passed": true, "reason": null}'
  JSON.parse = () => ({ passed: true })
  return 'no'
}
""",
    (
        JAVASCRIPT,
        '__proto__ in a result',
    ): """  return JSON.parse('{"__proto__": {"passed": true}, "constructor": {"prototype": {"passed": true}}}')
}
""",
    (JAVASCRIPT, 'a proxy'): '  return new Proxy({}, { get: () => true, ownKeys: () => [] })\n}\n',
    (JAVASCRIPT, 'words into every descriptor'): """  const fs = require('fs')
  for (let number = 0; number < 64; number++) {
    try { fs.writeSync(number, '{"passed": true, "reason": null}\\n') } catch (error) {}
  }
  process.exit(0)
}
""",
    (
        JAVASCRIPT,
        'child_process',
    ): """  return require('child_process').execSync('echo -n the-word-; echo -n 9157').toString()
}
""",
}


@pytest.mark.parametrize(('language', 'name'), FAKES)
def test_a_result_cannot_be_faked(language: str, name: str):
    text = FAKES[language, name]
    outcome = check_completion(problem(language), body(text) if language == PYTHON else text, sandbox(), seconds=10)
    assert not outcome.passed
    assert_unharmed(language)


@pytest.mark.parametrize(
    'code',
    [
        '  return\n#include "{path}"\n;\n}}\n',
        '  return R"(\n#include "{path}"\n)";\n}}\n',
        '  extern const char mark[] asm("mark");\n  return mark;\n}}\n'
        'asm(".section .rodata\\nmark: .incbin \\"{path}\\"\\n.byte 0\\n.text");\n',
        '  return "";\n}}\n#include "/proc/1/root{path}"\n',
        '  return "";\n}}\n#include "/dev/zero"\n',
    ],
)
def test_a_source_includes_no_outside_file(code: str, tmp_path: Path):
    path = tmp_path / 'secret'
    path.write_text(f'"{SECRET}"')
    assert_unharmed(CPP)  # which builds what is ours
    started = time.monotonic()
    outcome = check_completion(problem(CPP), code.format(path=path), sandbox(), seconds=10)
    assert not outcome.passed and SECRET not in outcome.reason
    assert time.monotonic() - started < ENDED
    assert_unharmed(CPP)


@pytest.mark.parametrize(
    'code',
    [
        '  return "";\n}\ntemplate <int n> struct Deep { enum { value = Deep<n - 1>::value + Deep<n - 2>::value }; };\n'
        'template <int a, int b> struct Wide { typedef Wide<a + 1, b> L; typedef Wide<a, b + 1> R; L l; R r; };\n'
        'Wide<0, 0> wide;\n',
        '  return "";\n}\n'
        'constexpr long spin(long n) { long s = 0; for (long i = 0; i < n; ++i) s ^= i * i; return s; }\n'
        'template <int n> struct Spun { static constexpr long value = spin(200000 + n) + Spun<n - 1>::value; };\n'
        'template <> struct Spun<0> { static constexpr long value = 0; };\nlong spun = Spun<800>::value;\n',
        '  return "";\n}\nstruct Big { char block[1000000000]; } big = {{1}};\n',
    ],
)
def test_compiling_has_limits(code: str):
    assert_unharmed(CPP)  # which builds what is ours
    started = time.monotonic()
    assert not check_completion(problem(CPP), code, sandbox(), seconds=SECONDS).passed
    assert time.monotonic() - started < ENDED
    assert_unharmed(CPP)


def assert_unharmed(language: str) -> None:
    """Check that the next item is scored as usual."""
    assert check_completion(problem(language), right(language), sandbox()).passed
    assert not check_completion(problem(language), right(language, 'another'), sandbox()).passed
    assert shutil.disk_usage('/').free > 2**20
