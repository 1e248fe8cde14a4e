"""Splitting of problems into parts, by hand."""

from __future__ import annotations

import pytest

from llmfoundry_gauntlet.scoring.code.programs import (
    CPP,
    JAVASCRIPT,
    PYTHON,
    make_program,
    signature_of,
    whole_text,
)


def program(language: str, prompt: str, entry_point: str = 'named', **more):
    return make_program(language=language, prompt=prompt, entry_point=entry_point, test='', **more)


@pytest.mark.parametrize(
    ('language', 'prompt', 'prelude', 'target'),
    [
        (PYTHON, 'def f(x):\n    """Twice."""\n', '', 'f'),
        (
            PYTHON,
            'import math\n\ndef help(x):\n    return x\n\n\ndef f(x):\n',
            'import math\n\ndef help(x):\n    return x\n\n\n',
            'f',
        ),
        (PYTHON, 'def f(x):\n    def inner(y):\n        return y\n', '', 'f'),  # a part of the solution, indented
        (PYTHON, 'async def f(x):\n', '', 'f'),
        (PYTHON, 'x = 1\n', '', 'named'),
        (
            JAVASCRIPT,
            'const help = (x) => {\n  return x\n}\n\nconst f = (x) => {\n',
            'const help = (x) => {\n  return x\n}\n\n',
            'f',
        ),
        (JAVASCRIPT, 'function f(x) {\n', '', 'f'),
        (JAVASCRIPT, '/* f: let x = 1 */\nasync function f(x) {\n', '/* f: let x = 1 */\n', 'f'),
        (
            CPP,
            '#include <map>\nusing namespace std;\nmap<char, int> f(string s){\n',
            '#include <map>\nusing namespace std;\n',
            'f',
        ),
        (
            CPP,
            'int help(int a) {\n  return a;\n}\nbool f(vector<int> a, int b)\n{\n',
            'int help(int a) {\n  return a;\n}\n',
            'f',
        ),
        (CPP, 'int f(\n    int a,\n    int b) {\n', '', 'f'),
    ],
)
def test_the_last_function_of_a_prompt_is_the_target(language, prompt, prelude, target):
    made = program(language, prompt)
    assert (made.prelude, made.target) == (prelude, target)


def test_pairs_call_the_entry_point():
    prompt = 'const help = (x) => {\n}\nconst f = (x) => {\n'
    assert program(JAVASCRIPT, prompt, 'help').target == 'f'
    assert program(JAVASCRIPT, prompt, 'help', pairs=(('1', '1'),)).target == 'help'


@pytest.mark.parametrize(
    ('prompt', 'returns', 'parameters', 'names'),
    [
        ('bool f(vector<int> a, int b){\n', 'bool', 'vector<int> a, int b', ['a', 'b']),
        (
            'std::map<char, int> f(std::map<char, int> seen) {\n',
            'std::map<char, int>',
            'std::map<char, int> seen',
            ['seen'],
        ),
        (
            'vector<string> f(const string& text,vector<int> &n){\n',
            'vector<string>',
            'const string& text,vector<int> &n',
            ['text', 'n'],
        ),
        ('long long f(){\n', 'long long', '', []),
        ('int f(map<a, b> m, pair<vector<int>, int> p){\n', 'int', 'map<a, b> m, pair<vector<int>, int> p', ['m', 'p']),
        ('unsigned  f (int x [ ]) {\n', 'unsigned', 'int x [ ]', ['x']),
    ],
)
def test_cpp_signatures(prompt, returns, parameters, names):
    signature = signature_of(program(CPP, prompt, 'f'))
    assert (signature.name, signature.returns) == ('f', returns)
    assert (signature.parameters, signature.names) == (parameters, names)


def test_a_missing_signature_is_an_error():
    with pytest.raises(ValueError, match='does not begin named'):
        signature_of(program(CPP, '#include <map>\n'))
    with pytest.raises(ValueError, match="'\\(\\)' has no name"):
        signature_of(program(CPP, 'int f(int) {\n', 'f'))._replace(parameters='()').names  # noqa: B018


@pytest.mark.parametrize(
    ('language', 'prompt', 'completion', 'whole'),
    [
        (PYTHON, 'def f():\n', '    return 1\n', 'def f():\n    return 1\n'),
        (PYTHON, 'def f():\n    x = 1', '    return x', 'def f():\n    x = 1\n    return x'),
        (PYTHON, 'def f():\n\tx = 1', '\treturn x', 'def f():\n\tx = 1\n\treturn x'),
        (PYTHON, 'def f():\n    return', ' 1', 'def f():\n    return 1'),
        (PYTHON, 'def f():\n    x = 1', '\n    return x', 'def f():\n    x = 1\n    return x'),
        (CPP, 'int f() {', '  return 1;', 'int f() {  return 1;'),
    ],
)
def test_a_missing_line_end_joins_prompt_and_completion(language, prompt, completion, whole):
    """Composer does not add one."""
    assert whole_text(program(language, prompt, 'f'), completion) == whole
    assert whole_text(program(language, prompt, 'f', joins_lines=False), completion) == prompt + completion
