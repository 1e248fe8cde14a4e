"""Programs run for real in each language."""

from __future__ import annotations

import math
from typing import Any

import pytest
from programs import CPP, JAVASCRIPT, PYTHON, need, problem, right, sandbox

from llmfoundry_gauntlet.scoring.code.execution import check_completion
from llmfoundry_gauntlet.scoring.code.programs import LANGUAGES, make_program
from llmfoundry_gauntlet.scoring.code.sandbox import CannotRun, Outcome, find_sandbox


def run(language: str, test: str, solution: str, prompt: str, **keys: Any) -> Outcome:
    need(language)
    made = make_program(language=language, prompt=prompt, entry_point='f', test=test, **keys)
    return check_completion(made, solution, sandbox())


def python(test: str, solution: str, prompt: str = 'def f(*args, **kwargs):\n', **keys: Any) -> Outcome:
    return run(PYTHON, test, solution, prompt, **keys)


def javascript(test: str, solution: str, prompt: str = 'const f = (...args) => {\n', **keys: Any) -> Outcome:
    return run(JAVASCRIPT, test, solution, prompt, **keys)


def cpp(test: str, solution: str, prompt: str, **keys: Any) -> Outcome:
    return run(CPP, f'#undef NDEBUG\n#include <assert.h>\n{test}', solution, prompt, **keys)


@pytest.mark.parametrize('language', LANGUAGES)
def test_right_and_wrong_programs(language: str):
    assert check_completion(problem(language), right(language), sandbox()) == Outcome(True, None)
    wrong = check_completion(problem(language), right(language, 'other'), sandbox())
    assert not wrong.passed and 'not the expected one' in wrong.reason
    broken = check_completion(problem(language), '  this is no program', sandbox())
    assert not broken.passed and ('before the first call' in broken.reason or 'compile' in broken.reason)
    empty = check_completion(problem(language), '', sandbox())
    assert not empty.passed


@pytest.mark.parametrize('level', ['rlimits', 'none'])
@pytest.mark.parametrize('language', LANGUAGES)
def test_results_do_not_depend_on_isolation(language: str, level: str):
    less = find_sandbox(level)
    assert check_completion(problem(language), right(language), less).passed
    assert not check_completion(problem(language), right(language, 'other'), less).passed


VALUES = [
    None,
    True,
    0,
    -7,
    2**80,
    0.1,
    -0.0,
    math.inf,
    'a\n"\\ é \U0001f600 \ud800',
    b'\x00\xff',
    1 + 2j,
    range(1, 9, 2),
    [1, [2.0, 'x'], None],
    (1, (2,)),
    {1: 'a', (1, 2): [3], 'k': {'n': 1}},
    {1, 'a', (2, 3)},
    frozenset({1}),
    [],
    {},
    set(),
]


@pytest.mark.parametrize('value', VALUES)
def test_plain_values_are_copied_exactly(value):
    test = (
        f'def check(candidate):\n    value = {value!r}\n'.replace('inf', 'float("inf")')
        + '    result = candidate(value)\n'
        '    assert result == value and type(result) is type(value) and repr(result) == repr(value)\n'
        '    assert candidate(key=value) == value\n'
    )
    if isinstance(value, (set, frozenset)):
        test = test.replace(' and repr(result) == repr(value)', '')
    assert python(test, '    return args[0] if args else kwargs["key"]\n') == Outcome(True, None)


@pytest.mark.parametrize(
    ('solution', 'passes'),
    [
        ('    import collections\n    return collections.Counter({"a": 2})\n', True),  # as in one process
        ('    class Mine(dict):\n        pass\n    return Mine(a=2)\n', True),
        ('    return {"a": True + 1}\n', True),
        ('    return [("a", 2)]\n', False),
        ('    return object()\n', False),
    ],
)
def test_subclasses_become_their_base_types(solution: str, passes: bool):
    assert python('def check(candidate):\n    assert candidate() == {"a": 2}\n', solution).passed == passes


def test_iterators_stay_iterators():
    test = 'def check(candidate):\n    assert list(candidate()) == [0, 1, 2]\n'
    assert python(test, '    return iter(range(3))\n').passed
    assert python(test, '    yield from range(3)\n').passed
    endless = python(test, '    while True:\n        yield 0\n')
    assert not endless.passed


def test_the_test_may_use_what_the_prompt_defines():
    prompt = 'import math\n\n\ndef twice(x):\n    return 2 * x\n\n\ndef f(x):\n    """Half."""\n'
    test = 'def check(candidate):\n    assert math.isclose(twice(candidate(3)), 3)\n    assert f(4) == 2\n'
    assert python(test, '    return x / 2\n', prompt).passed
    fake = '    return 0\n\ndef twice(x):\n    return 3\n'
    assert not python(test, fake, prompt).passed  # the test has its own


@pytest.mark.parametrize(
    ('solution', 'reason'),
    [
        ('    return 1 / 0\n', 'ZeroDivisionError in a call'),
        ('    raise ValueError("words of the program")\n', 'ValueError in a call'),
        ('    class Own(KeyError):\n        pass\n    raise Own()\n', 'KeyError in a call'),
        ('    import sys\n    sys.exit(3)\n', 'SystemExit in a call'),
        ('    return undefined\n', 'NameError in a call'),
        ('    return 1\nimport numpy\n', 'ModuleNotFoundError before the first call'),  # the same everywhere
        ('    return )\n', 'SyntaxError before the first call'),
        ('    import os\n    os._exit(0)\n', 'the program ended before its test did'),
        ('    return lambda: 1\n', 'the result of a call is no plain value'),
        ('    return 2\n', 'call 1: the result is not the expected one'),
    ],
)
def test_reasons_contain_no_text_of_the_program(solution: str, reason: str):
    outcome = python('def check(candidate):\n    assert candidate(1) == 1\n    assert candidate(2) == 1\n', solution)
    assert outcome == Outcome(False, reason)


def test_a_test_without_calls_fails():
    assert python('def check(candidate):\n    pass\n', '    return 1\n') == Outcome(False, 'the test makes no call')
    assert javascript('1 + 1', '  return 1\n}\n') == Outcome(False, 'the test makes no call')


def test_an_error_of_the_test_is_the_reason():
    outcome = python('def check(candidate):\n    candidate(1)\n    missing()\n', '    return 1\n')
    assert outcome == Outcome(False, 'NameError in the test, after call 1')


@pytest.mark.parametrize(
    ('given', 'wanted', 'passes'),
    [
        ('([1, 2],)', '3', True),
        ('([1, 2],)', '4', False),
        ('([],)', '0', True),
    ],
)
def test_results_of_python_are_compared_with_those_of_input_output_pairs(given: str, wanted: str, passes: bool):
    pairs = (('([5],)', '5'), (given, wanted))
    outcome = python('', '    return sum(x)\n', 'def f(x):\n', pairs=pairs)
    assert outcome.passed == passes


def test_a_result_that_is_no_expression_is_a_text():
    outcome = python('', '    return x\n', 'def f(x):\n', pairs=(("('a b',)", 'a b'),))
    assert outcome.passed


@pytest.mark.parametrize(
    ('solution', 'passes'),
    [
        ('  return a.map((x) => 2 * x)\n}\n', True),
        ('  return a\n}\n', False),
    ],
)
def test_results_of_javascript_are_compared_with_those_of_input_output_pairs(solution: str, passes: bool):
    outcome = javascript('', solution, 'const f = (a) => {\n', pairs=(('[1, 2]', '[2, 4]'),))
    assert outcome.passed == passes


@pytest.mark.parametrize(
    ('solution', 'passes'),
    [
        ('  for (auto& x : a) x *= b;\n  return a;\n}\n', True),
        ('  return a;\n}\n', False),
    ],
)
def test_results_of_cpp_are_compared_with_those_of_input_output_pairs(solution: str, passes: bool):
    prompt = '#include <vector>\nusing namespace std;\nvector<float> f(vector<float> a, float b) {\n'
    outcome = run(CPP, '', solution, prompt, pairs=(('{1, 2}, 3', '{3, 6.00001}'),))
    assert outcome.passed == passes


def test_javascript_values_are_copied():
    test = """
const util = require('util')
const values = [undefined, null, -0, NaN, Infinity, 12n, 'é', [1, [2]], {a: {b: [1]}}]
for (const value of [...values, new Map([[1, [2]]]), new Set([1])]) {
  console.assert(util.isDeepStrictEqual(f(value), value))
}
"""
    assert javascript(test, '  return args[0]\n}\n') == Outcome(True, None)
    for solution, reason in (
        ('  return () => 1\n}\n', 'the result of a call is no plain value'),
        ('  throw new TypeError("words")\n}\n', 'TypeError in a call'),
    ):
        assert javascript('console.assert(f() === 1)', solution) == Outcome(False, reason)


def test_cpp_values_are_copied():
    prompt = """#include <bits/stdc++.h>
using namespace std;
map<string, vector<pair<int, double>>> f(map<string, vector<pair<int, double>>> m, const string& s, vector<bool> b,
                                         set<char> c, long long n, unsigned char u) {
"""
    test = """int main() {
  map<string, vector<pair<int, double>>> m = {{"a", {{1, 0.1}, {-2, 1e300}}}, {"", {}}};
  auto found = f(m, string("x\\0y", 3), {true, false, true}, {'p', 'q'}, -5000000000LL, 200);
  m["seen"] = {{3, 101.0}, {2, -5000000000.0}, {200, 0}};
  assert(found == m);
}
"""
    solution = """  m["seen"] = {{int(s.size()), b[0] * 100 + b[1] * 10 + b[2]}, {int(c.size()), double(n)}, {u, 0}};
  return m;
}
"""
    assert cpp(test, solution, prompt) == Outcome(True, None)


def test_a_cpp_function_may_have_a_library_name():
    prompt = '#include <vector>\nusing namespace std;\nfloat max_element(vector<float> l) {\n'
    test = 'int main() { assert(max_element({1, 3, 2}) == 3); }\n'
    assert cpp(test, '  float m = l[0];\n  for (float x : l) if (x > m) m = x;\n  return m;\n}\n', prompt).passed


@pytest.mark.parametrize(
    ('solution', 'reason'),
    [
        ('  return nothing;\n}\n', 'does not compile'),
        ('  int* p = 0; return *p;\n}\n', 'the program ended before its test did'),
        ('  return 2;\n}\n', 'the result of a call is not the expected one'),
    ],
)
def test_cpp_reasons(solution: str, reason: str):
    test = 'int main() { assert(f(1) == 1); }\n'
    assert cpp(test, solution, 'int f(int a) {\n') == Outcome(False, reason)


def test_nan_fails_in_cpp():
    """Some tests ask whether results differ by more than a bound, which is false for NaN."""
    test = '#include <cstdlib>\nint main() { if (f(1) - 1 > 1e-4 || 1 - f(1) > 1e-4) abort(); }\n'
    prompt = '#include <cmath>\nusing namespace std;\ndouble f(double x) {\n'
    assert cpp(test, '  return x;\n}\n', prompt).passed
    assert cpp(test, '  return NAN;\n}\n', prompt) == Outcome(False, 'the result of a call is no plain value')


@pytest.mark.parametrize('returned', ['2', '1'])
def test_asynchronous_javascript_tests_are_awaited(returned: str):
    test = '(async () => { await null; console.assert(await f(1) === 2) })()'
    assert javascript(test, f'  return {returned}\n}}\n').passed == (returned == '2')
    later = 'setTimeout(() => { console.assert(f(1) === 2) }, 20)'
    assert javascript(later, f'  return {returned}\n}}\n').passed == (returned == '2')


@pytest.mark.parametrize(
    ('solution', 'passes'),
    [
        ('    raise ValueError("no")\n', True),
        ('    raise KeyError("no")\n', False),
        ('    return 1\n', False),
        ('    import os\n    os._exit(0)\n', False),
        ('    return object()\n', False),
    ],
)
def test_a_python_test_may_expect_an_exception(solution: str, passes: bool):
    test = (
        'def check(candidate):\n    try:\n        candidate(1)\n    except ValueError:\n        return\n'
        '    except BaseException:\n        assert False\n    assert False\n'
    )
    assert python(test, solution).passed == passes


def test_a_test_that_catches_everything_still_fails():
    test = 'def check(candidate):\n    try:\n        candidate(1)\n    except BaseException:\n        pass\n'
    for solution in ('    import os\n    os._exit(0)\n', '    return object()\n'):
        assert not python(test, solution).passed
    test = 'let ok = true\ntry { f() } catch (error) { ok = true }\nconsole.assert(ok)'
    assert not javascript(test, '  throw new Error()\n}\n').passed


@pytest.mark.parametrize(
    ('prompt', 'solution', 'expected'),
    [
        ('def f(x):\n', '    from fractions import Fraction\n    return Fraction(1, 2)\n', '== 0.5'),
        ('def f(x):\n', '    from decimal import Decimal\n    return Decimal("1.5")\n', '== 1.5'),
        ('def f(x):\n', '    return {1: 2}.keys()\n', '== {1}'),
        ('async def f(x):\n', '    return x\n', '== 1'),
    ],
)
def test_other_plain_values_are_copied(prompt: str, solution: str, expected: str):
    outcome = python(f'def check(candidate):\n    assert candidate(1) {expected}\n', solution, prompt)
    assert outcome == Outcome(True, None)


@pytest.mark.parametrize('language', LANGUAGES)
def test_unencodable_text_fails_without_an_error(language: str):
    assert not check_completion(problem(language), '\ud800', sandbox()).passed


def test_programs_are_unscored_if_the_test_does_not_compile():
    with pytest.raises(CannotRun, match='the test does not compile'):
        cpp('int main() { return nothing; }', '  return 1;\n}\n', 'int f(int a) {\n')
    with pytest.raises(CannotRun, match='does not begin f'):
        cpp('int main() {}', '  return 1;\n}\n', 'int f = [](int a) {\n')
