"""Prompts, written by hand from the rules of llm-foundry's `construct_context`."""

import hashlib
import random
from dataclasses import replace

import pytest

from llmfoundry_gauntlet.evaluation.suite import load_suite
from llmfoundry_gauntlet.tasks.encode import Encoder
from llmfoundry_gauntlet.tasks.items import Preparation
from llmfoundry_gauntlet.tasks.language_modeling import Passage
from llmfoundry_gauntlet.tasks.multiple_choice import Choices
from llmfoundry_gauntlet.tasks.schema import Schema
from llmfoundry_gauntlet.types import Example

PASSAGES = [Passage('1+1=', '2'), Passage('2+2=', '4'), Passage('3+3=', '6')]
CHOICES = [Choices('Sky?', ('blue', 'green'), 0), Choices('Grass?', ('blue', 'green'), 1)]
SCHEMAS = [Schema(('the cup', 'the bag'), 'was full.', 1), Schema(('he', 'she'), 'sang.', 0)]


def task(kind: str, num_shots: int = 0, **keys):
    entry = {'label': 't', 'dataset_uri': 'x', 'num_fewshot': [num_shots], 'icl_task_type': kind, **keys}
    return load_suite([entry]).tasks[0]


def prompt(kind: str, contents, num_shots: int, **keys):
    """Return the prompt of the first content, with the next ones as shots."""
    first, *shots = [Example(row=i, content=content) for i, content in enumerate(contents)]
    return task(kind, **keys).prompt(first, shots[:num_shots])


@pytest.mark.parametrize(
    ('num_shots', 'keys', 'preamble', 'context'),
    [
        (0, {}, '', '1+1='),
        (2, {}, '2+2= 4\n3+3= 6', '\n1+1='),
        (0, {'continuation_delimiter': '\nAnswer: '}, '', '1+1=\nAnswer:'),
        (1, {'continuation_delimiter': '\nAnswer: '}, '2+2=\nAnswer: 4', '\n1+1=\nAnswer:'),
        (1, {'prelimiter': 'Q: '}, 'Q: 2+2= 4', '\nQ: 1+1='),
        (0, {'prompt_string': 'Add.'}, 'Add.', '\n1+1='),
        (2, {'prompt_string': 'Add.'}, 'Add.\n2+2= 4\n3+3= 6', '\n1+1='),
        (2, {'example_delimiter': '###'}, '2+2= 4###3+3= 6', '###1+1='),
        (0, {'strip_dataset': False}, '', '1+1= '),
    ],
)
def test_language_modelling_prompts(num_shots: int, keys: dict, preamble: str, context: str):
    made = prompt('language_modeling', PASSAGES, num_shots, **keys)
    assert (made.preamble, made.contexts, made.continuations) == (preamble, (context,), ('2',))


def test_multiple_choice_prompts():
    made = prompt('multiple_choice', CHOICES, 1)
    assert made.preamble == 'Grass? green'
    assert made.contexts == ('\nSky?',)
    assert made.continuations == ('blue', 'green')
    assert made.text == 'Grass? green\nSky?'


@pytest.mark.parametrize(
    ('num_shots', 'keys', 'preamble', 'contexts'),
    [
        (0, {}, '', ('the cup', 'the bag')),  # nothing precedes: no continuation delimiter
        (0, {'prelimiter': 'P: '}, '', ('P: the cup', 'P: the bag')),
        (1, {}, 'he sang.', ('\nthe cup', '\nthe bag')),
        # upstream puts the prelimiter before the example delimiter
        (1, {'prelimiter': 'P: '}, 'P: he sang.', ('P: \nthe cup', 'P: \nthe bag')),
        (1, {'strip_dataset': False}, 'he sang.', ('\nthe cup ', '\nthe bag ')),
        (0, {'prompt_string': 'Go.', 'continuation_delimiter': ' - '}, 'Go.', ('\nthe cup -', '\nthe bag -')),
    ],
)
def test_schema_prompts(num_shots: int, keys: dict, preamble: str, contexts: tuple):
    made = prompt('schema', SCHEMAS, num_shots, **keys)
    assert (made.preamble, made.contexts) == (preamble, contexts)
    assert made.continuations == ('was full.', 'was full.')


def items(character_tokenizer, *, max_seq_len: int, truncation: str = 'drop_shots'):
    preparation = Preparation(
        task=replace(task('language_modeling', 2), truncation=truncation),
        examples=[Example(row=i, content=content) for i, content in enumerate(PASSAGES)],
        encoder=Encoder(character_tokenizer),
        max_seq_len=max_seq_len,
    )
    return preparation.items()


def text(item) -> str:
    return ''.join(map(chr, item.request.contexts[0])).replace('\1', '^')


def test_whole_shots_are_dropped_first(character_tokenizer):
    """Fix 4: the reference drops tokens from the left, through the first shot and the special tokens."""
    whole = [text(item) for item in items(character_tokenizer, max_seq_len=100)]
    assert whole[0] == '^2+2= 4\n3+3= 6\n1+1='
    assert not any(item.request.truncated for item in items(character_tokenizer, max_seq_len=100))
    short = items(character_tokenizer, max_seq_len=19)
    assert text(short[0]) == '^3+3= 6\n1+1='
    assert all(item.request.truncated for item in short)
    reference = items(character_tokenizer, max_seq_len=18, truncation='reference')
    assert text(reference[0]) == '+2= 4\n3+3= 6\n1+1='
    assert all(item.request.truncated for item in reference)


def test_the_hash_is_that_of_the_prompt_as_sent(character_tokenizer):
    whole = items(character_tokenizer, max_seq_len=100)[0]
    assert whole.prompt_sha256 == hashlib.sha256(b'2+2= 4\n3+3= 6\n1+1=').hexdigest()
    short = items(character_tokenizer, max_seq_len=19)[0]
    assert short.prompt_sha256 == hashlib.sha256(b'3+3= 6\n1+1=').hexdigest()


def test_fixed_shots_are_the_same_unless_they_contain_the_item(character_tokenizer):
    """Rows 1 and 4 are duplicates. Of the distinct rows, 3 and 0 are drawn, and 5 as the spare."""
    assert random.Random(1234).sample([0, 1, 2, 3, 5], 3) == [3, 0, 5]
    contents = [Passage(f'{number}+{number}=', f'{2 * number}') for number in (1, 2, 3, 4, 2, 6)]
    preparation = Preparation(
        task=replace(task('language_modeling', 2), fewshot='fixed'),
        examples=[Example(row=i, content=content) for i, content in enumerate(contents)],
        encoder=Encoder(character_tokenizer),
        max_seq_len=100,
    )
    assert [text(item) for item in preparation.items()] == [
        '^4+4= 8\n6+6= 12\n1+1=',
        '^4+4= 8\n1+1= 2\n2+2=',
        '^4+4= 8\n1+1= 2\n3+3=',
        '^6+6= 12\n1+1= 2\n4+4=',
        '^4+4= 8\n1+1= 2\n2+2=',
        '^4+4= 8\n1+1= 2\n6+6=',
    ]
