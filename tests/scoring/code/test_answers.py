"""Programs in answers: where they end, and what is run of them, by running it."""

from __future__ import annotations

import re
import textwrap

import pytest
from programs import need, sandbox

from llmfoundry_gauntlet.scoring.code.assembly import program_end, source_of
from llmfoundry_gauntlet.scoring.code.execution import check_source
from llmfoundry_gauntlet.scoring.code.programs import CPP, JAVASCRIPT, PYTHON, Program, make_program

PROMPTS = {
    PYTHON: 'from typing import List\n\n\ndef total(values: List[int]) -> int:\n'
    '    """ Sum.\n    >>> total([1])\n    1\n    """\n',
    CPP: '#include<vector>\nusing namespace std;\n'
    'int twice(int n){\n    return 2 * n;\n}\nint total(vector<int> values){\n',
    JAVASCRIPT: '/* Sum.\n  */\nconst twice = (n) => 2 * n\n\nconst total = (values) => {\n',
}
TESTS = {
    PYTHON: 'def check(candidate):\n    assert candidate([1, 2]) == 3\n    assert candidate([]) == 0\n',
    CPP: '#undef NDEBUG\n#include<assert.h>\nint main(){\n'
    '    assert (total({1, 2}) == 3);\n    assert (total({}) == 0);\n}\n',
    JAVASCRIPT: 'console.assert(total([1, 2]) === 3)\nconsole.assert(total([]) === 0)\n',
}
# The body of the function and the function; START is what a sum begins with, 0 in a right program.
BODIES = {
    PYTHON: '    s = START\n    for v in values:\n        s += v\n    return s\n',
    CPP: '    int s = START;\n    for (int v : values) {\n        s += v;\n    }\n    return s;\n}\n',
    JAVASCRIPT: '  let s = START;\n  for (const v of values) {\n    s += v;\n  }\n  return s;\n}\n',
}
FUNCTIONS = {
    PYTHON: 'def total(values):\n' + BODIES[PYTHON],
    CPP: 'int total(const std::vector<int>& values) {\n' + BODIES[CPP],
    JAVASCRIPT: 'function total(values) {\n' + BODIES[JAVASCRIPT],
}
# A helper, with the name of one that the prompts of C++ and JavaScript have; and a function that calls it.
HELPERS = {
    PYTHON: 'def twice(n):\n    return n * 2\n',
    CPP: 'int twice(int n) {\n    return n * 2;\n}\n',
    JAVASCRIPT: 'const twice = (n) => n * 2;\n',
}
CALLERS = {
    PYTHON: 'def total(values):\n    return sum(twice(v) for v in values) // 2 + START\n',
    CPP: 'int total(vector<int> values) {\n    int s = START;\n'
    '    for (int v : values) s += twice(v);\n    return s / 2;\n}\n',
    JAVASCRIPT: 'const total = (values) =>\n  values.map(twice)\n    .reduce((a, b) => a + b, 0) / 2 + START;\n',
}
DRIVERS = {
    PYTHON: 'assert total([1]) == 8\n',
    CPP: 'int main() {\n  return nonsense;\n}\n',
    JAVASCRIPT: 'console.log(nonsense)\n',
}
NEXT = {
    PYTHON: '@cache\ndef other(x):\n    """Next."""\n    return (x\n',
    CPP: 'int other(int x) {\n  return (x\n',
    JAVASCRIPT: 'const other = (x) => {\n  return (x\n',
}
INFO = {PYTHON: 'python', CPP: 'cpp', JAVASCRIPT: 'javascript'}

# {b} body, {f} function, {c} function that calls the helper {h}, {d} a call that fails, {n} a broken next function,
# {i} info string of the language.
FORMS = {
    'body': '{b}',
    'body, next function': '{b}\n\n{n}',
    'body, call': '{b}\n{d}',
    'body, sentence': "{b}\nIt doesn't do much.\n",
    'body, list': '{b}\n- it adds them\n',
    'body, quotation': '{b}\n> it adds them\n',
    'body, quoted text': '{b}\n"""It adds them."""\n',
    'body, other script': '{b}\n\u041e\u043d\u0430.\n',
    'body, special token': '{b}<|endoftext|>',
    'body, code block': "{b}```\n\nIt doesn't do much.\n",
    'body, indented end of code block': '{b}    ```\n',
    'block of the function': '```{i}\n{f}```\n',
    'block of the function, no info': '```\n{f}```\n',
    'block of the function, tildes': '~~~{i}\n{f}~~~\n',
    'block of the function, four marks': '````{i}\n{f}````\n',
    'block of the function, indented': '  ```{i}\n  {f:2}  ```\n',
    'block of the function, in a list': '1. Add:\n\n   ```{i}\n   {f:3}   ```\n2. Done.\n',
    'block of the function, unfinished': '```{i}\n{f}',
    'block of the function, closed on its last line': '```{i}\n{f:s}```',
    'block of the body': '```{i}\n{b}```\n',
    'block of the body, sentences': "Sure! Here's it:\n\n```{i}\n{b}```\n\nIt's (see above simple.\n",
    'sentences around a block': "Sure! Here's the function:\n\n```{i}\n{f}```\n\nIt's (see above simple.\n",
    'sentence on the line of the block': "Here's the function: ```{i}\n{f}```\n",
    'block with a call': '```{i}\n{f}\n{d}```\n',
    'block with a broken next function': '```{i}\n{f}\n{n}',
    'block, then calls': '```{i}\n{f}```\nUse it:\n```{i}\n{d}```\n',
    'block, then output': '```{i}\n{f}```\nOutput:\n```\n3\n```\n',
    'shell, then block': '```bash\npip install x\n```\n\n```{i}\n{f}```\n',
    'wrong block, then right block': '```{i}\n{wrong}```\nWait, that is wrong:\n```{i}\n{f}```\n',
    'helper before': '{h}\n{c}',
    'helper in the block': '```{i}\n{h}\n\n{c}```\n',
    'helper in a block of its own': 'First:\n```{i}\n{h}```\nThen:\n```{i}\n{c}```\n',
    'function': '{f}',
    'function after a line': '\n{f}',
    'function, next function': '\n{f}\n\n{n}',
    'function, call': '\n{f}\n{d}',
    'function, sentence': "\n{f}\nIt doesn't do much.\n",
    'function, special token': '{f}<|im_end|>\n',
    'sentence, function': "Here's the function:\n\n{f}",
    'helper, sentence, function': "{h}\nNow it's easy:\n\n{c}",
    'function, end of code block': "{f}```\n\nIt doesn't do much.\n",
}
# Forms of one language.
MORE = {
    PYTHON: {
        'helper after': '{c}\n\n{h}',
        'imports': '```python\nfrom __future__ import annotations\nimport math\n\n{f}```\n',
        'body at the margin in a block': '```python\n{b:m}```\n',
        'body that lost the indentation of its first line': '{b:l}',
        'body at the margin, sentence': '{b:m}\nThis adds the values.\n',
        'sentence, body': 'The body is:\n\n{b}',
        'body with two spaces': '  s = START\n  for v in values:\n    s += v\n  return s\n',
        'body with tabs': '\ts = START\n\tfor v in values:\n\t\ts += v\n\treturn s\n',
        'text at the margin in a string': '    s = """\nx\n"""\n    return sum(values) + START\n',
        'brackets at the margin': '    s = [\n0,\n]\n    return sum(values, s[0]) + START\n',
        'comment at the margin': '    s = START\n# add\n    return sum(values) + s\n',
        'call with a doctest': '{b}>>> total([1])\n',
        'code at the end of its line': '`return sum(values) + START`',
        'lambda': '```python\ntotal = lambda values: sum(values) + START\n```\n',
        'class': 'class Solution:\n    def total(self, values):\n        return sum(values) + START\n',
        'block of a class': '```python\nclass Solution:\n'
        '    def total(self, values):\n        return sum(values) + START\n```\n',
        'nested function of the same name': '    def total(v):\n        return sum(v)\n'
        '    return total(values) + START\n',
        'decorated': '@staticmethod\n{f}',
        'function, decorator of nothing': '\n{f}\n@cache\n',
        'function, quotation without an end': '\n{f}\n"""\nIt adds (them.\n',
    },
    CPP: {
        'raw string': '    string r = R"x(" } )" )x"; char c = \'}\'; // }\n{b}',
        'macros': '#define END }\n#define BEGIN {\n{b}\nDone.\n',
        'left out by the preprocessor': '    #if 0\n}\n#endif\n{b}',
        'headers': '```cpp\n#include <bits/stdc++.h>\nusing namespace std;\n\n{f}```\n',
        'other types': '```cpp\nlong long total(std::vector<int>& values) {\n{b}```\n',
        'template': '```cpp\ntemplate <typename T>\nT total(std::vector<T> values) {\n{b}```\n',
        'class': '```cpp\nclass Solution {\npublic:\n    int total(vector<int>& values) {\n{b}};\n```\n',
        'body without its closing brace in a block': '```cpp\n'
        '    return accumulate(values.begin(), values.end(), START);\n```\n',
    },
    JAVASCRIPT: {
        'helper after': '{c}\n\n{h}',
        'braces in patterns': "  const r = /[}]'/; r.test('a')\n{b}",
        'pattern after an arrow': "  const r = () => /[}]'/; r()\n{b}",
        'templates in templates': '  const t = `}${[1].map((x) => `${{ a: x }.a}}`)}`\n{b}',
        'exported': '```js\nmodule.exports = function (values) {\n{b}```\n',
        'exported by name': '```js\n{f}\nmodule.exports = { total };\n```\n',
        'exported by default': '```js\nexport default {f}```\n',
        'class': '```js\nclass Solution {\n  total(values) {\n{b}}\n```\n',
        'body without its closing brace in a block': '```js\n  return values.reduce((a, b) => a + b, START);\n```\n',
    },
}


class Text(str):
    """A text whose format says how it is changed: indented after its first line, stripped, or moved to the margin."""

    def __format__(self, how: str) -> str:
        match how:
            case 's':
                return self.strip()
            case 'm':
                return textwrap.dedent(self)
            case 'l':
                return self.lstrip()
            case '':
                return str(self)
        return textwrap.indent(self, ' ' * int(how)).lstrip(' ')


def problem(language: str) -> Program:
    need(language)
    return make_program(language=language, prompt=PROMPTS[language], entry_point='total', test=TESTS[language])


def answer(language: str, form: str, start: str) -> str:
    parts = {
        'b': BODIES[language],
        'f': FUNCTIONS[language],
        'c': CALLERS[language],
        'h': HELPERS[language],
        'd': DRIVERS[language],
        'n': NEXT[language],
    }
    wrong = FUNCTIONS[language].replace('START', '5')
    # Only the names of parts are fields: other braces belong to the program.
    template = re.sub(r'\{(?!(?:[bfchdni]|wrong)(?::\w)?\})', '{{', form)
    template = re.sub(r'(?<!\{[bfchdni])(?<!\{[bfchdni]:\w)(?<!\{wrong)\}', '}}', template)
    texts = {name: Text(part.replace('START', start)) for name, part in parts.items()}
    return template.format(**texts, i=INFO[language], wrong=wrong).replace('START', start)


FORMS_BY_LANGUAGE = [
    pytest.param(
        language, form, id=f'{language}: {name}', marks=[pytest.mark.slow] if language == CPP and name != 'body' else []
    )
    for language in (PYTHON, JAVASCRIPT, CPP)
    for name, form in {**FORMS, **MORE[language]}.items()
]


@pytest.mark.slow  # compiles and runs every form
@pytest.mark.parametrize(('language', 'form'), FORMS_BY_LANGUAGE)
def test_a_program_in_any_form_counts_as_it_is(language: str, form: str):
    program = problem(language)
    right, wrong = answer(language, form, '0'), answer(language, form, '5')
    for text in (right, right.replace('\n', '\r\n')):
        outcome = check_source(program, source_of(program, text), sandbox())
        assert outcome.passed, (outcome.reason, source_of(program, text))
    assert not check_source(program, source_of(program, wrong), sandbox()).passed


@pytest.mark.parametrize(('language', 'form'), FORMS_BY_LANGUAGE)
def test_a_longer_text_has_the_same_end(language: str, form: str):
    """Else a generation that was stopped would be scored otherwise than one from elsewhere."""
    end = program_end(problem(language))
    text = answer(language, form, '0')
    position = end.position(text)
    for length in range(len(text)):
        so_far = end.position(text[:length])
        assert so_far in (None, position), (text[:length], so_far)


@pytest.mark.parametrize(
    ('prompt', 'text'),
    [
        ('def total(values):\n    return', ' sum(values) + START'),
        ('def total(values):\n    return', '    return sum(values) + START\n'),
        ('def total(values):\n    return', '```python\nreturn sum(values) + START\n```'),
        ('def total(values):\n    return', 'Here is it:\n```python\n{f}```\n'),
        ("def total(values):\n    s = {'", "\u00e9': START}\n    return sum(values) + s['\u00e9']\nend"),
        ('def total(values):\n    s = [\n        0,', '\n        START,\n    ]\n    return sum(values) + sum(s)\n'),
        ('def total(values):\n    s = START\n    for v in values:\n', '        s += v\n    return s\n'),
        ('def total(values):\n    for v in values:', '\n        pass\n    return sum(values) + START\n'),
        ('def total(values):', '\n  return sum(values) + START\n'),
    ],
)
def test_an_answer_continues_a_prompt_that_ends_in_the_middle(prompt: str, text: str):
    text = text.replace('{f}', FUNCTIONS[PYTHON])
    for start, passes in (('0', True), ('5', False)):
        program = make_program(
            language=PYTHON, prompt=prompt.replace('START', start), entry_point='total', test=TESTS[PYTHON]
        )
        source = source_of(program, text.replace('START', start))
        assert check_source(program, source, sandbox()).passed is passes, source
