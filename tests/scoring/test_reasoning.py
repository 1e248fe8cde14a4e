"""The answer in a generation, after a model's reasoning."""

import pytest

from llmfoundry_gauntlet.scoring.code.lexers import ProgramEnd
from llmfoundry_gauntlet.scoring.code.programs import CPP
from llmfoundry_gauntlet.scoring.reasoning import KNOWN_MARKERS, is_opened_by, read_generation
from llmfoundry_gauntlet.types import Reasoning, ReasoningMarkers, StopRule

NO_STOPS = StopRule()
LINE = StopRule(answer_end='\n')
BODY = StopRule(program=ProgramEnd(language=CPP, target='f'))
ANALYSIS = '<|channel|>analysis<|message|>It is A.<|end|><|start|>assistant'


def answer(text: str, *, is_open: bool = False, stops: StopRule = NO_STOPS, markers=KNOWN_MARKERS) -> str | None:
    return read_generation(text, stops, Reasoning(markers=markers, is_open=is_open)).answer


@pytest.mark.parametrize(
    ('text', 'expected'),
    [
        ('B', 'B'),
        (' 7\n', ' 7\n'),
        ('', ''),
        ('<think>A?</think>B', 'B'),
        ('<think>\nA?\n</think>\n\nB\n', 'B\n'),
        (' \n<think>A</think> \n \n    return 2', '    return 2'),  # the indentation of a program
        ('<think>A</think>\n\n', ''),
        ('<think></think>B', 'B'),
        ('<think>\n\n</think>\n\nB', 'B'),
        ('<think>A', None),
        ('<think>', None),
        ('B <think>or A', None),
        ('Let me see. <think>A</think>B', 'B'),
        ('A\n</think>\nB', 'B'),  # the beginning is in the prompt, or a server removed it
        ('A</think>', ''),
        ('<think>A</think>C<think>no</think>B', 'B'),
        ('<think>A</think>B<think>sure</think>\n', 'B'),
        ('<think>A</think>B<think>or C, or', 'B'),
        ('<think>A</think>\n<think>or C, or', None),
        ('<think>the tag </think> ends</think>B', 'B'),
        ('<THINK>A</Think>B', 'B'),
        ('<think>A</think>```python\nx', '```python\nx'),
        ('print(\'<think>\', "</think>")', 'print(\'<think>\', "</think>")'),
        ('the tag `<think>` opens it', 'the tag `<think>` opens it'),
        ('<thinking>A</thinking>B', 'B'),
        ('<thought>A</thought>B', 'B'),
        ('<reasoning>A</reasoning>B', 'B'),
        ('<seed:think>A</seed:think>B', 'B'),
        ('[THINK]A[/THINK]B', 'B'),
        ('<|begin_of_thought|>A<|end_of_thought|>B', 'B'),
        ('<|START_THINKING|>A<|END_THINKING|>B', 'B'),
        ('◁think▷A◁/think▷B', 'B'),
        (f'{ANALYSIS}<|channel|>final<|message|>B', 'B'),
        (ANALYSIS, None),
        ('<|channel|>analysis<|message|>A', None),
        ('<|channel|>final<|message|>B', 'B'),
        ('analysisIt is A.assistantfinalB', 'B'),
        ('I think the thought <b>B</b> [thinks]', 'I think the thought <b>B</b> [thinks]'),
    ],
)
def test_the_answer_is_what_follows_the_reasoning(text: str, expected: str | None):
    assert answer(text) == expected


@pytest.mark.parametrize(
    ('text', 'expected'),
    [
        ('A?\n</think>\n\nB', 'B'),
        ('A?', None),
        ('', None),
        ('<think>A?</think>B', 'B'),  # the model repeats the beginning
        ('<think>A?', None),
    ],
)
def test_a_generation_may_begin_inside_reasoning(text: str, expected: str | None):
    assert answer(text, is_open=True) == expected


@pytest.mark.parametrize(
    ('prompt', 'expected'),
    [
        ('<|im_start|>assistant\n<think>\n', True),
        ('<|im_start|>assistant\n<think>', True),
        ('[/INST][THINK]', True),
        ('<|start|>assistant<|channel|>analysis<|message|>', True),
        ('<|im_start|>assistant\n<think>\n\n</think>\n\n', False),
        ('<|im_start|>assistant\n', False),
        ('What does <think> mean?', False),
        ('', False),
    ],
)
def test_a_prompt_may_open_the_reasoning(prompt: str, expected: bool):
    assert is_opened_by(prompt, KNOWN_MARKERS) == expected


@pytest.mark.parametrize(
    ('text', 'stops', 'shown', 'expected'),
    [
        ('<think>A\nB\n</think>\n\nC\nD', LINE, '<think>A\nB\n</think>\n\nC', 'C'),
        ('A\nB\n</think>\nC\nD', LINE, 'A\nB\n</think>\nC', 'C'),
        ('<think>A\nB', LINE, '<think>A\nB', None),
        ('C\nD', LINE, 'C', 'C'),
        ('<think>Q: A</think>C Q: D', StopRule(strings=('Q:',)), '<think>Q: A</think>C ', 'C '),
        ('<think>} {</think>x; }\n}', BODY, '<think>} {</think>x; }', 'x; }'),
    ],
)
def test_a_stop_in_the_reasoning_is_none(text: str, stops: StopRule, shown: str, expected: str | None):
    reading = read_generation(text, stops, Reasoning(markers=KNOWN_MARKERS))
    assert (reading.text, reading.answer) == (shown, expected)


def test_other_marks_replace_the_known_ones():
    plan = (ReasoningMarkers('PLAN:', 'DONE:'), ReasoningMarkers('', '###'))
    assert answer('PLAN: A DONE: B', markers=plan) == ' B'
    assert answer('A ### B', markers=plan) == ' B'
    assert answer('PLAN: A', markers=plan) is None
    assert answer('<think>A</think>B', markers=plan) == '<think>A</think>B'
    assert answer('<think>A', markers=()) == '<think>A'
    assert not is_opened_by('<think>', plan) and is_opened_by('PLAN: ', plan)


def test_without_reasoning_all_of_a_generation_is_its_answer():
    reading = read_generation('<think>A\n</think>B', LINE, None)
    assert (reading.text, reading.answer) == ('<think>A', '<think>A')
