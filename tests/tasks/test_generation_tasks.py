"""Generation with answers, worked out by hand from llm-foundry 0.22's dataset for it: rows, prompts, requests, scores.

The texts of prompts and the lengths of generations were also compared with its `construct_context` and
`_get_max_answer_length`.
"""

import hashlib
from dataclasses import replace

import pytest

from llmfoundry_gauntlet.errors import DataError, ModelError
from llmfoundry_gauntlet.evaluation.suite import load_suite
from llmfoundry_gauntlet.metrics.metrics import task_score
from llmfoundry_gauntlet.tasks.encode import Encoder
from llmfoundry_gauntlet.tasks.generation import OpenQuestion
from llmfoundry_gauntlet.tasks.items import Preparation, item_result
from llmfoundry_gauntlet.types import Example, Generation, ItemKey, ItemResult, Sampling, StopRule

ROW = {'context': '1+1=', 'answer': '2'}
PROBLEMS = [
    OpenQuestion('1+1=', ('2',), None),
    OpenQuestion('2+2=', ('4',), None),
    OpenQuestion('3+3=', ('6',), None),
]
THOUGHTS = [
    OpenQuestion('1+1=', ('2', 'two'), 'One and one.'),
    OpenQuestion('2+2=', ('4', 'four'), 'Two, twice.'),
    OpenQuestion('3+3=', ('6', 'six'), 'Thrice two.'),
]
TWO_LINES = [*PROBLEMS, OpenQuestion('?', ('4', 'four\nfive'), None)]


def task(num_shots: int = 0, **keys):
    entry = {'label': 't', 'dataset_uri': 'rows.jsonl', 'num_fewshot': [num_shots], **keys}
    return load_suite([{'icl_task_type': 'generation_task_with_answers', **entry}]).tasks[0]


def with_thoughts(num_shots: int = 0, **keys):
    """Return a task with the keys of gsm8k."""
    keys = {'cot_delimiter': ' #### ', 'continuation_delimiter': '\nA: ', 'prelimiter': 'Q: ', **keys}
    return task(num_shots, **keys)


@pytest.mark.parametrize(
    ('keys', 'expected'),
    [
        ({'answer': ' 2 '}, OpenQuestion('1+1=', ('2',), None)),
        # strings in lists stay as they are, each once
        ({'aliases': ['two', '2', ' II', 'two', '']}, OpenQuestion('1+1=', ('2', 'two', ' II', ''), None)),
        ({'aliases': None, 'chain_of_thought': None}, OpenQuestion('1+1=', ('2',), None)),
        ({'aliases': [], 'chain_of_thought': 'One and one.\n'}, OpenQuestion('1+1=', ('2',), 'One and one.')),
        ({'context': ''}, OpenQuestion('', ('2',), None)),
    ],
)
def test_a_row_has_a_context_an_answer_and_optional_keys(write_jsonl, tmp_path, keys: dict, expected: OpenQuestion):
    write_jsonl('rows.jsonl', [{**ROW, **keys}])

    (example,) = task().read(tmp_path).examples

    assert example.content == expected


def test_context_and_answer_may_have_other_keys(write_jsonl, tmp_path):
    write_jsonl('rows.jsonl', [{'question': '1+1=', 'total': '2'}])

    (example,) = task(context_key='question', answer_key='total').read(tmp_path).examples

    assert example.content == PROBLEMS[0]


def test_an_answer_of_white_space_is_an_error(write_jsonl, tmp_path):
    write_jsonl('rows.jsonl', [{**ROW, 'answer': ' \n'}])

    with pytest.raises(DataError, match=r'rows\.jsonl:1: answer is white space'):
        task(strip_dataset=False).read(tmp_path)


def examples(problems=PROBLEMS) -> list[Example]:
    return [Example(row=row, content=content) for row, content in enumerate(problems)]


@pytest.mark.parametrize(
    ('spec', 'problems', 'preamble', 'context'),
    [
        (task(), PROBLEMS[:1], '', '1+1='),
        (task(1, strip_dataset=False, prompt_string='Add.'), PROBLEMS[:2], 'Add.\n2+2= 4', '\n1+1= '),
        # without thoughts in the rows nothing precedes an answer, not even the delimiter
        (task(1, cot_delimiter=' #### '), PROBLEMS[:2], '2+2= 4', '\n1+1='),
        (with_thoughts(), THOUGHTS[:1], '', 'Q: 1+1=\nA:'),
        (
            with_thoughts(2),
            THOUGHTS,
            'Q: 2+2=\nA: Two, twice. #### 4\nQ: 3+3=\nA: Thrice two. #### 6',
            '\nQ: 1+1=\nA:',
        ),
        (
            with_thoughts(1, example_delimiter='\n\n', cot_delimiter='The answer is '),
            THOUGHTS[:2],
            'Q: 2+2=\nA: Two, twice.The answer is 4',
            '\n\nQ: 1+1=\nA:',
        ),
    ],
)
def test_shots_show_the_thought_and_the_preferred_answer(spec, problems, preamble, context):
    first, *shots = examples(problems)

    prompt = spec.prompt(first, shots)

    assert (prompt.preamble, prompt.contexts, prompt.continuations) == (preamble, (context,), ())


@pytest.mark.parametrize(
    ('spec', 'problems', 'expected'),
    [
        # without stops of its own: the end of the answer, or the beginning of the next problem
        (task(), PROBLEMS, StopRule(answer_end='\n')),
        (task(example_delimiter='\n\n', prelimiter=' '), PROBLEMS, StopRule(answer_end='\n\n')),
        (with_thoughts(), THOUGHTS, StopRule(strings=('\nQ: ',), answer_delimiter=' #### ', answer_end='\n')),
        # a thought may be asked for in other ways than by shots, and its first line is no answer
        (task(cot_delimiter='So: '), PROBLEMS, StopRule(answer_delimiter='So: ', answer_end='\n')),
        # a delimiter that occurs in right answers ends no generation
        (task(), TWO_LINES, StopRule()),
        (task(example_delimiter=''), PROBLEMS, StopRule()),
        (with_thoughts(), TWO_LINES, StopRule(strings=('\nQ: ',), answer_delimiter=' #### ')),
        (with_thoughts(early_stopping_criteria=['\n\n', '.']), PROBLEMS, StopRule(strings=('\n\n', '.'))),
        (with_thoughts(early_stopping_criteria=[]), PROBLEMS, StopRule()),
        # fix 5: the reference has no stop by default, and reads a task's stops as a pattern
        (replace(with_thoughts(), semantics='reference'), THOUGHTS, StopRule(as_pattern=True)),
        (
            replace(with_thoughts(early_stopping_criteria=['\n\n', '.']), semantics='reference'),
            PROBLEMS,
            StopRule(strings=('\n\n', '.'), as_pattern=True),
        ),
    ],
)
def test_generations_end_at_stops(spec, problems, expected: StopRule):
    assert spec.stops(problems) == expected


def text(request) -> str:
    return ''.join(map(chr, request.context)).replace('\1', '^')


def preparation(tokenizer, spec, examples, *, max_seq_len: int = 100, **settings) -> Preparation:
    return Preparation(
        task=replace(spec, **settings),
        examples=examples,
        encoder=Encoder(tokenizer),
        max_seq_len=max_seq_len,
    )


def requests(tokenizer, spec, problems=PROBLEMS, **settings):
    return [item.request for item in preparation(tokenizer, spec, examples(problems), **settings).items()]


@pytest.mark.parametrize(
    ('spec', 'problems', 'expected'),
    [
        (task(), PROBLEMS, 2),  # bos and a character
        (task(), [*PROBLEMS, OpenQuestion('?', ('4', 'fourteen'), None)], 9),
        # bos, 'One and one.', ' #### ', 'two' and 10 more
        (with_thoughts(), THOUGHTS, 1 + 12 + 6 + 3 + 10),
        (task(cot_delimiter=' #### '), PROBLEMS, 2 + 10),  # for a delimiter alone as well
        (with_thoughts(cot_delimiter=''), THOUGHTS, 1 + 12 + 3),
        (task(generation_kwargs={'max_new_tokens': 5}), PROBLEMS, 5),
        (with_thoughts(generation_kwargs={'max_new_tokens': 5}), THOUGHTS, 5),
    ],
)
def test_max_new_tokens_is_the_longest_response_and_some_more_after_a_thought(
    character_tokenizer, spec, problems, expected: int
):
    """llm-foundry 0.22: `_get_max_answer_length`, and generation_kwargs over it."""
    limits = [request.max_new_tokens for request in requests(character_tokenizer, spec, problems)]

    assert limits == [expected] * len(problems)


@pytest.fixture
def in_categories(character_tokenizer):
    """Return a function that prepares four problems of two categories, of which the first has a long answer."""
    problems = [OpenQuestion('7*2=', ('fourteen',), None), *PROBLEMS]
    rows = [replace(example, category='baba'[row]) for row, example in enumerate(examples(problems))]

    def prepare(truncation: str) -> Preparation:
        spec = task(1, has_categories=True)
        return preparation(character_tokenizer, spec, rows, max_seq_len=14, truncation=truncation)

    return prepare


@pytest.mark.parametrize('truncation', ['drop_shots', 'reference'])
def test_a_category_has_the_limit_of_its_own_longest_answer(in_categories, truncation: str):
    """llm-foundry 0.22 makes a data set of each category (`get_icl_task_dataloader`)."""
    prepared = in_categories(truncation)

    assert [item.request.max_new_tokens for item in prepared.items()] == [9, 2, 9, 2]
    # A subset of the rows changes no limit.
    assert [item.request.max_new_tokens for item in prepared.items(prepared.examples[2:])] == [9, 2]


@pytest.mark.parametrize(
    ('truncation', 'last_five'),
    [
        ('drop_shots', '^7*2='),
        ('reference', '\n7*2='),
    ],
)
def test_prompts_of_a_category_are_truncated_by_its_own_limit(in_categories, truncation: str, last_five: str):
    """A prompt of 'a' may have 12 tokens, which '^3+3= 6 1+1=' has, and one of 'b' 5."""
    of_b, of_a, *_ = in_categories(truncation).items()

    assert text(of_b.request) == last_five
    assert text(of_a.request) == '^3+3= 6\n1+1='
    if truncation == 'drop_shots':  # the hash is that of the prompt as sent, without the dropped shot
        assert of_b.prompt_sha256 == hashlib.sha256(b'7*2=').hexdigest()


@pytest.mark.parametrize('max_seq_len', [1, 2])
def test_a_prompt_that_cannot_fit_is_an_error_with_both_numbers(character_tokenizer, max_seq_len: int):
    with pytest.raises(ModelError, match=rf'^t/2-shot: .* 2 tokens.*max_seq_len is {max_seq_len}'):
        requests(character_tokenizer, task(2), max_seq_len=max_seq_len)


def test_a_prompt_of_a_single_token_fits(character_tokenizer):
    made = requests(character_tokenizer, task(2), max_seq_len=3)

    assert [len(request.context) for request in made] == [1, 1, 1]


def test_a_setting_that_leaves_no_room_for_a_prompt_is_named(character_tokenizer):
    spec = task(generation_kwargs={'max_new_tokens': 40})

    with pytest.raises(ModelError, match=r'40 tokens \(generation_kwargs\.max_new_tokens\), but max_seq_len is 40'):
        requests(character_tokenizer, spec, max_seq_len=40)


def test_the_reference_leaves_room_for_the_longest_answer_whatever_is_asked(character_tokenizer):
    spec = task(generation_kwargs={'max_new_tokens': 40})

    with pytest.raises(ModelError, match='2 tokens'):
        requests(character_tokenizer, spec, max_seq_len=2, truncation='reference')


WHOLE = '^2+2= 4\n3+3= 6\n1+1='  # 19 tokens


@pytest.mark.parametrize(
    ('max_new_tokens', 'truncation', 'max_seq_len', 'expected'),
    [
        # fix 4: the first shots go, as many as must, so that a generation of two tokens, or as many as given, fits
        (None, 'drop_shots', 21, WHOLE),
        (None, 'drop_shots', 20, '^3+3= 6\n1+1='),  # 12 tokens
        (None, 'drop_shots', 13, '^1+1='),
        (None, 'drop_shots', 6, '^+1='),  # without shots still too long: the question is cut
        (5, 'drop_shots', 24, WHOLE),
        (5, 'drop_shots', 23, '^3+3= 6\n1+1='),
        # llm-foundry 0.22's `padding_size` leaves room for the longest answer, bos and a character, whatever is asked
        (None, 'reference', 21, WHOLE),
        (None, 'reference', 9, ' 6\n1+1='),  # 7 tokens
        (400, 'reference', 20, WHOLE[1:]),
    ],
)
def test_prompts_are_truncated_to_leave_room_for_the_generation(
    character_tokenizer, max_new_tokens: int | None, truncation: str, max_seq_len: int, expected: str
):
    given = {} if max_new_tokens is None else {'max_new_tokens': max_new_tokens}
    spec = task(2, generation_kwargs=given)

    made = requests(character_tokenizer, spec, max_seq_len=max_seq_len, truncation=truncation)

    assert (text(made[0]), made[0].prompt_shortened) == (expected, expected != WHOLE)
    assert {(request.max_new_tokens, request.unscorable) for request in made} == {(max_new_tokens or 2, None)}
    assert truncation == 'reference' or max(request.length for request in made) <= max_seq_len


@pytest.mark.parametrize(
    ('given', 'expected'),
    [
        ({}, Sampling()),
        ({'do_sample': False}, Sampling()),
        # the defaults are those of transformers, and the seed is that of the shots
        ({'do_sample': True}, Sampling(temperature=1.0, top_p=1.0, top_k=50, seed=1234)),
        (
            {'do_sample': True, 'temperature': 2, 'top_p': 0.5, 'top_k': 3, 'seed': 9},
            Sampling(temperature=2.0, top_p=0.5, top_k=3, seed=9),
        ),
    ],
)
def test_requests_have_stops_and_sampling(character_tokenizer, given: dict, expected: Sampling):
    (request, *_) = requests(character_tokenizer, task(generation_kwargs=given))

    assert (request.sampling, request.stops) == (expected, StopRule(answer_end='\n'))


def result(tokenizer, generated: str, spec=None, problem: OpenQuestion = THOUGHTS[0], **keys) -> ItemResult:
    """Score one problem by what was generated."""
    spec = spec or with_thoughts()
    (item,) = preparation(tokenizer, spec, examples([problem])).items()
    output = Generation(key=ItemKey('t/0-shot', 0), text=generated, **{'num_tokens': 7, 'is_truncated': False, **keys})
    return item_result(item, output, spec)


@pytest.mark.parametrize(
    ('generated', 'keys', 'expected', 'reason'),
    [
        ('One and one. #### 2\nQ: 2+2=\nA: #### 4', {}, (1, 1, 1, 0, 0), None),  # truncated at the stop
        ('so #### two', {}, (1, 1, 1, 0, 0), None),
        ('so #### 2.0', {}, (1, 0, 1, 0, 0), None),
        ('so #### $2.', {}, (1, 1, 1, 0, 0), None),
        ('so #### 22', {}, (1, 0, 0, 0, 0), None),  # the prefix accepts it
        ('so #### about 2', {}, (0, 0, 1, 0, 0), None),
        ('One and one.\n#### 2', {}, (1, 1, 1, 0, 0), None),  # the delimiter in other white space
        ('1.0 + 1.0#### 2.0', {}, (1, 0, 1, 0, 0), None),
        ('2', {}, (1, 1, 1, 0, 1), 'no delimiter found, so all of it is compared'),
        ('One and one', {'is_truncated': True}, (0, 0, 0, 1, 1), 'no delimiter found, so all of it is compared; tr'),
        (' \n ', {}, (0, 0, 0, 0, 1), 'empty'),
        ('One and one. #### ', {}, (0, 0, 0, 0, 0), 'empty answer'),
        ('One and one. #### 2', {'is_truncated': True}, (1, 1, 1, 1, 0), 'token limit'),
        ('', {'is_truncated': True}, (0, 0, 0, 1, 1), 'token limit'),
        # generated elsewhere: unknown whether it was truncated
        ('so #### 2', {'is_truncated': None}, (1, 1, 1, 0), None),
        ('so #### 2', {'is_finite': False}, (None,), 'not finite'),  # fix 1
    ],
)
def test_accuracy_strict_match_numeric_match_and_the_shares_of_generations(
    character_tokenizer, generated: str, keys: dict, expected: tuple, reason: str | None
):
    scored = result(character_tokenizer, generated, **keys)

    assert (scored.score, *scored.metrics.values()) == expected
    assert scored.status == ('unscored' if scored.score is None else 'scored')
    assert scored.reason is None if reason is None else reason in scored.reason
    assert (scored.gold, scored.num_tokens, scored.predicted, scored.logprobs) == ('2', (7,), None, None)
    assert scored.text == generated.partition('\nQ: ')[0]


@pytest.mark.parametrize(
    ('generated', 'keys', 'problem', 'corrected', 'reference'),
    [
        # gold normalized to ''
        ('so #### b', {}, OpenQuestion('?', ('$a$',), 'So.'), (0, 'so #### b'), (1, 'so #### b')),
        # the reference has no stop and takes the last answer
        ('#### 4\nQ: 1+1=\nA: #### 2', {}, THOUGHTS[0], (0, '#### 4'), (1, '#### 4\nQ: 1+1=\nA: #### 2')),
        # its stops are patterns
        ('two #### 2', {'early_stopping_criteria': ['o.']}, THOUGHTS[0], (1, 'two #### 2'), (0, 'tw')),
        # without normalization signs and case count
        ('#### -2', {'do_normalization': False}, THOUGHTS[0], (0, '#### -2'), (0, '#### -2')),
        # its delimiter has its own white space
        ('so\n#### 2', {}, THOUGHTS[0], (1, 'so\n#### 2'), (0, 'so\n#### 2')),
    ],
)
def test_reference_semantics_score_by_the_references_rules(
    character_tokenizer, generated: str, keys: dict, problem: OpenQuestion, corrected: tuple, reference: tuple
):
    for semantics, expected in (('corrected', corrected), ('reference', reference)):
        spec = replace(with_thoughts(**keys), semantics=semantics)

        scored = result(character_tokenizer, generated, spec, problem)

        assert (scored.score, scored.text) == expected


def test_reference_semantics_score_what_came_from_logits_that_are_not_finite(character_tokenizer):
    spec = replace(with_thoughts(), semantics='reference')

    assert result(character_tokenizer, 'so #### 2', spec, is_finite=False).score == 1


def test_an_unscorable_item_is_unscored_with_its_reason(character_tokenizer):
    (item,) = preparation(character_tokenizer, task(), examples(PROBLEMS[:1])).items()
    item = replace(item, request=replace(item.request, unscorable='why'))

    unscored = item_result(item, None, task())

    assert (unscored.status, unscored.reason) == ('unscored', 'why')
    assert (unscored.text, unscored.num_tokens) == (None, None)


@pytest.fixture
def four_results(character_tokenizer) -> list[ItemResult]:
    texts = [
        'so #### 2',  # right by every metric
        'so #### 22',  # begins with the right answer
        'so #### 2.0',  # begins with it, and is the same number
        'so #### 4',  # wrong, and truncated
    ]
    results = []
    for row, generated in enumerate(texts):
        scored = result(character_tokenizer, generated, is_truncated=row == 3)
        results.append(replace(scored, key=ItemKey('t/0-shot', row)))
    assert [scored.answer for scored in results] == ['2', '22', '2.0', '4']
    return results


MEANS = {
    'InContextLearningGenerationExactMatchAccuracy': 3 / 4,
    'StrictMatch': 1 / 4,
    'NumericMatch': 2 / 4,
    'TruncatedShare': 1 / 4,
    'NoDelimiterShare': 0,
    'GoldBitsPerByte': None,  # no right generation was scored
}


def test_metrics_are_means_over_items(four_results: list[ItemResult]):
    measures = task_score('t/0-shot', with_thoughts().metrics(), four_results).metrics

    assert {name: measure.value for name, measure in measures.items()} == MEANS


def test_a_metric_that_an_item_lacks_is_absent_with_its_reason(four_results: list[ItemResult]):
    first, *others = four_results
    # Of this one it is unknown whether it is truncated.
    without_share = {name: value for name, value in first.metrics.items() if name != 'TruncatedShare'}

    results = [replace(first, metrics=without_share), *others]
    measures = task_score('t/0-shot', with_thoughts().metrics(), results).metrics

    assert {name: measure.value for name, measure in measures.items()} == {**MEANS, 'TruncatedShare': None}
    assert '1 of 4' in measures['TruncatedShare'].reason
