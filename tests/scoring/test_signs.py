"""Special tokens and signs around an answer."""

import time

import pytest

from llmfoundry_gauntlet.scoring.reasoning import KNOWN_MARKERS, read_generation
from llmfoundry_gauntlet.scoring.signs import plain_letters, without_signs, without_special_tokens
from llmfoundry_gauntlet.types import Reasoning, StopRule

ENDS = [
    '<|im_end|>',
    '</s>',
    '<|eot_id|>',
    '<end_of_turn>',
    '<|endoftext|>',
    '<eos>',
    '[/INST]',
    '<|end_of_text|>',
    '<|end|>',
    '<|return|>',
    '<|eom_id|>',
    '<|END_OF_TURN_TOKEN|>',
    '<\uff5cend▁of▁sentence\uff5c>',
    '<end_of_utterance>',
    '<pad>',
    '<|pad|>',
    '<unk>',
    '[EOS]',
    '<EOS_TOKEN>',
    '<|im_end|>\n<|endoftext|>',
    '</s></s> </s>\n',
    '<|eos|>',
    '<|user|>',
    '<|end_of_solution|>',
    '<unused7>',
    '<|reserved_special_token_3|>',
    '<|im_end|>\n',
]
STARTS = [
    '<s>',
    '<|begin_of_text|>',
    '<bos>',
    '<|im_start|>assistant\n',
    '<s> ',
    '[/INST]',
    '<start_of_turn>model\n',
    '<|start_header_id|>assistant<|end_header_id|>\n\n',
    '<\uff5cAssistant\uff5c>',
    '<|begin_of_solution|>',
    '<|assistant|>\n',
]
NEXT_TURNS = [
    '<|im_end|>\n<|im_start|>user\nWhat is 5?\n',
    '</s>\nQ: What is 5?\nA: 5',
    '<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n5?',
    '<end_of_turn>\n<start_of_turn>user\n5?<end_of_turn>',
    '<|endoftext|>5',
    '<\uff5cUser\uff5c>5?',
    '</s><s>[INST] 5? [/INST] 5',
]


def answer(text: str) -> str | None:
    return read_generation(text, StopRule(), Reasoning(markers=KNOWN_MARKERS)).answer


@pytest.mark.parametrize('end', ENDS)
@pytest.mark.parametrize('text', ['B', 'the 7', '    return x\n', ''])
def test_special_tokens_at_the_end_are_dropped(text: str, end: str):
    assert answer(text + end).rstrip('\n') == text.rstrip('\n')
    assert answer(f'<think>A</think>{text}{end}').rstrip('\n') == text.rstrip('\n')


@pytest.mark.parametrize('start', STARTS)
def test_special_tokens_at_the_beginning_are_dropped(start: str):
    assert answer(f'{start}B').strip() == 'B'
    assert answer(f'{start}<think>A</think>B') == 'B'
    assert answer(f'<think>A</think>{start}B').strip() == 'B'


@pytest.mark.parametrize('more', NEXT_TURNS)
def test_an_answer_ends_with_its_turn(more: str):
    assert answer(f'B{more}') == 'B'


@pytest.mark.parametrize(
    'text',
    [
        "x = '<|endoftext|>'\nprint(x)",
        'f(`</s>`)',
        'a < b | c > d',
        'if (a <|b|> c)',
        '<b>7</b>',
        'vector<int> s',
        '[1, 2]',
        'a[INSTALL]',
        ' 7 ',
        'a<s and s>b',
        'f"<s>{x}</s>" + y',
    ],
)
def test_other_text_stays(text: str):
    assert answer(text) == text


@pytest.mark.parametrize(
    ('text', 'beside', 'expected'),
    [
        ('✅ 18', (), '  18'),
        ('18 ✔️', (), '18   '),
        ('• 18 🎉', (), '  18  '),
        ('❌ 18', (), '❌ 18'),
        ('♥', ('♠', '♥'), '♥'),
        ('18 °C ± 2', (), '18 °C ± 2'),
    ],
)
def test_signs_are_dropped_unless_they_may_be_the_answer(text: str, beside: tuple[str, ...], expected: str):
    assert without_signs(text, beside) == expected


def test_letters_and_digits_of_another_width_are_plain():
    assert plain_letters('\uff21\uff08\uff22\uff09\uff11\uff18\uff05🅱🅒') == 'A(B)18%BC'


@pytest.mark.parametrize('piece', ['<|', '<|a', '</s', '<s>', '[', '<|im_end|>', "'</s>'", ' ', '|>'])
def test_long_generations_are_searched_in_time(piece: str):
    started = time.process_time()
    answer(piece * 20_000)
    without_special_tokens(piece * 20_000)
    assert time.process_time() - started < 5
