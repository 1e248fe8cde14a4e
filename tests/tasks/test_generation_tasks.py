"""Generation with answers, by hand from the rules in llm-foundry 0.22's dataset for it.

The texts of prompts and the lengths of replies were also compared with its `construct_context` and
`_get_max_answer_length`.
"""

from dataclasses import replace

import pytest

from llmfoundry_gauntlet.errors import DataError, ModelError
from llmfoundry_gauntlet.evaluation.suite import load_suite
from llmfoundry_gauntlet.tasks import metrics_of, task_types
from llmfoundry_gauntlet.tasks.encode import Encoder
from llmfoundry_gauntlet.tasks.generation import GenerationTask, Problem
from llmfoundry_gauntlet.tasks.items import Preparation
from llmfoundry_gauntlet.tasks.prepare import describe
from llmfoundry_gauntlet.types import Example, Sampling, StopRule

ACCURACY = 'InContextLearningGenerationExactMatchAccuracy'
ROW = {'context': '1+1=', 'answer': '2'}
PROBLEMS = [Problem('1+1=', ('2',), None), Problem('2+2=', ('4',), None), Problem('3+3=', ('6',), None)]
THOUGHTS = [
    Problem('1+1=', ('2', 'two'), 'One and one.'),
    Problem('2+2=', ('4', 'four'), 'Two, twice.'),
    Problem('3+3=', ('6', 'six'), 'Thrice two.'),
]


def task(num_shots: int = 0, **keys):
    entry = {'label': 't', 'dataset_uri': 'rows.jsonl', 'num_fewshot': [num_shots], **keys}
    return load_suite([{'icl_task_type': 'generation_task_with_answers', **entry}]).tasks[0]


def with_thoughts(num_shots: int = 0, **keys):
    """As gsm8k is asked."""
    keys = {'cot_delimiter': ' #### ', 'continuation_delimiter': '\nA: ', 'prelimiter': 'Q: ', **keys}
    return task(num_shots, **keys)


def test_it_is_the_type_of_its_name():
    assert task_types()['generation_task_with_answers'] is GenerationTask
    assert [metric.name for metric in metrics_of(task())] == [ACCURACY, 'StrictMatch', 'NumericMatch', 'CutShare']
    assert GenerationTask.generates and not GenerationTask.runs_programs


def test_a_row_has_a_context_an_answer_and_what_else_there_may_be(write_jsonl, tmp_path):
    rows = [
        {**ROW, 'answer': ' 2 '},
        {**ROW, 'aliases': ['two', '2', ' II', 'two', '']},
        {**ROW, 'aliases': None, 'chain_of_thought': None},
        {**ROW, 'aliases': [], 'chain_of_thought': 'One and one.\n'},
        {**ROW, 'context': ''},
    ]
    write_jsonl('rows.jsonl', rows)
    assert [example.content for example in task().read(tmp_path).examples] == [
        Problem('1+1=', ('2',), None),
        Problem('1+1=', ('2', 'two', ' II', ''), None),  # strings in lists stay as they are, each once
        Problem('1+1=', ('2',), None),
        Problem('1+1=', ('2',), 'One and one.'),
        Problem('', ('2',), None),
    ]
    assert Problem('1+1=', ('2', 'two'), None).gold == '2'


def test_every_wrong_row_is_listed_with_file_and_line(write_jsonl, tmp_path):
    rows = [
        {'context': '1+1='},
        {'answer': '2'},
        {**ROW, 'answer': 2},
        {**ROW, 'answer': None},
        {**ROW, 'answer': ['2']},
        {**ROW, 'answer': ' '},
        {**ROW, 'context': 7},
        {**ROW, 'aliases': 'two'},
        {**ROW, 'aliases': {'two': 2}},
        {**ROW, 'aliases': ['two', 2]},
        {**ROW, 'chain_of_thought': ['so']},
    ]
    write_jsonl('rows.jsonl', rows)
    with pytest.raises(DataError) as raised:
        task().read(tmp_path)
    assert [line.replace(f'{tmp_path}/', '') for line in raised.value.problems] == [
        "rows.jsonl:1: the key 'answer' is missing; found: context",
        "rows.jsonl:2: the key 'context' is missing; found: answer",
        'rows.jsonl:3: answer is 2; allowed: text',
        'rows.jsonl:4: answer is empty; allowed: text',
        'rows.jsonl:5: answer is a list; allowed: text',
        'rows.jsonl:6: answer is empty; allowed: text',
        'rows.jsonl:7: context is 7; allowed: text',
        "rows.jsonl:8: aliases is 'two'; allowed: a list of texts",
        'rows.jsonl:9: aliases is a mapping; allowed: a list of texts',
        'rows.jsonl:10: aliases[1] is 2; allowed: text',
        'rows.jsonl:11: chain_of_thought is a list; allowed: text',
    ]


def test_other_names_of_keys_are_read_and_an_answer_of_white_space_is_refused_where_it_is_not_stripped(
    write_jsonl, tmp_path
):
    write_jsonl('rows.jsonl', [{'question': '1+1=', 'reply': '2'}])
    spec = task(context_key='question', answer_key='reply')
    assert spec.read(tmp_path).examples[0].content == PROBLEMS[0]
    write_jsonl('rows.jsonl', [{**ROW, 'answer': ' \n'}])
    with pytest.raises(DataError, match=r'rows\.jsonl:1: answer is white space; allowed: text'):
        task(strip_dataset=False).read(tmp_path)


def prompt(spec, problems):
    """The prompt of the first problem after the others as shots."""
    first, *shots = [Example(row=row, content=content) for row, content in enumerate(problems)]
    return spec.prompt(first, shots)


@pytest.mark.parametrize(
    ('spec', 'problems', 'preamble', 'context'),
    [
        (task(), PROBLEMS[:1], '', '1+1='),
        (task(2), PROBLEMS, '2+2= 4\n3+3= 6', '\n1+1='),
        (task(1, strip_dataset=False), PROBLEMS[:2], '2+2= 4', '\n1+1= '),
        (task(1, prompt_string='Add.'), PROBLEMS[:2], 'Add.\n2+2= 4', '\n1+1='),
        (task(0, prompt_string='Add.'), PROBLEMS[:1], 'Add.', '\n1+1='),
        # without thoughts in the rows nothing stands before an answer, not even the delimiter
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
        (with_thoughts(1, cot_delimiter=''), THOUGHTS[:2], 'Q: 2+2=\nA: Two, twice.4', '\nQ: 1+1=\nA:'),
    ],
)
def test_shots_show_the_thought_and_the_preferred_answer_and_the_question_nothing(spec, problems, preamble, context):
    made = prompt(spec, problems)
    assert (made.preamble, made.contexts, made.continuations) == (preamble, (context,), ())


def test_every_right_answer_makes_a_right_reply():
    assert with_thoughts().responses(THOUGHTS[0]) == ('One and one. #### 2', 'One and one. #### two')
    assert with_thoughts().responses(Problem('?', ('a', 'b'), None)) == ('a', 'b')


def stops(spec, problems=PROBLEMS, *, reference: bool = False) -> StopRule:
    return replace(spec, semantics='reference' if reference else 'corrected').stops(problems)


def test_without_stops_of_its_own_a_reply_ends_with_its_answer_or_where_the_next_problem_begins():
    assert stops(task()) == StopRule(answer_end='\n')
    assert stops(task(example_delimiter='\n\n', prelimiter=' ')) == StopRule(answer_end='\n\n')
    assert stops(with_thoughts(), THOUGHTS) == StopRule(strings=('\nQ: ',), answer_delimiter=' #### ', answer_end='\n')


def test_a_delimiter_of_thoughts_is_waited_for_also_where_rows_show_none():
    """The model may have been asked for a thought in other ways; its first line is then no answer."""
    assert stops(task(cot_delimiter='The answer is ')) == StopRule(answer_delimiter='The answer is ', answer_end='\n')


def test_a_delimiter_that_right_answers_have_in_them_does_not_end_a_reply():
    two_lines = [*PROBLEMS, Problem('?', ('4', 'four\nfive'), None)]
    assert stops(task(), two_lines) == StopRule()
    assert stops(task(example_delimiter='')) == StopRule()
    assert stops(with_thoughts(), two_lines) == StopRule(strings=('\nQ: ',), answer_delimiter=' #### ')


def test_stops_of_its_own_are_all_there_are():
    assert stops(with_thoughts(early_stopping_criteria=['\n\n', '.'])) == StopRule(strings=('\n\n', '.'))
    assert stops(with_thoughts(early_stopping_criteria=[])) == StopRule()


def test_the_reference_has_the_tasks_stops_as_a_pattern_and_else_none():
    """Fix 5: generation there has no stop by default and runs on."""
    assert stops(with_thoughts(), THOUGHTS, reference=True) == StopRule(as_pattern=True)
    given = with_thoughts(early_stopping_criteria=['\n\n', '.'])
    assert stops(given, reference=True) == StopRule(strings=('\n\n', '.'), as_pattern=True)


def preparation(tokenizer, spec, examples, *, max_seq_len: int = 100, **settings) -> Preparation:
    task = replace(spec, **settings)
    return Preparation(task=task, examples=examples, encoder=Encoder(tokenizer), max_seq_len=max_seq_len)


def examples(problems=PROBLEMS) -> list[Example]:
    return [Example(row=row, content=content) for row, content in enumerate(problems)]


def requests(tokenizer, spec, problems=PROBLEMS, **settings):
    return [item.request for item in preparation(tokenizer, spec, examples(problems), **settings).items()]


@pytest.mark.parametrize(
    ('spec', 'problems', 'expected'),
    [
        (task(), PROBLEMS, 2),  # bos and a character
        (task(), [*PROBLEMS, Problem('?', ('4', 'fourteen'), None)], 9),
        # bos, 'One and one.', ' #### ', 'two' and 10 more
        (with_thoughts(), THOUGHTS, 1 + 12 + 6 + 3 + 10),
        (task(cot_delimiter=' #### '), PROBLEMS, 2 + 10),  # for a delimiter alone as well
        (with_thoughts(cot_delimiter=''), THOUGHTS, 1 + 12 + 3),
        (task(generation_kwargs={'max_new_tokens': 5}), PROBLEMS, 5),
        (with_thoughts(generation_kwargs={'max_new_tokens': 5}), THOUGHTS, 5),
    ],
)
def test_a_reply_may_be_as_long_as_the_longest_right_one_and_some_more_after_a_thought(
    character_tokenizer, spec, problems, expected: int
):
    """llm-foundry 0.22: `_get_max_answer_length`, and generation_kwargs over it."""
    made = requests(character_tokenizer, spec, problems)
    assert [request.max_new_tokens for request in made] == [expected] * len(problems)


def in_categories(problems: dict[str, Problem]) -> list[Example]:
    return [Example(row=row, category=name[0], content=problem) for row, (name, problem) in enumerate(problems.items())]


@pytest.mark.parametrize('truncation', ['drop_shots', 'reference'])
def test_a_category_has_the_limit_of_its_own_longest_answer(character_tokenizer, truncation: str):
    """llm-foundry 0.22 makes a data set of each category (`get_icl_task_dataloader`); a subset changes no limit."""
    problems = {'b1': Problem('7*2=', ('fourteen',), None), 'a1': PROBLEMS[0], 'b2': PROBLEMS[1], 'a2': PROBLEMS[2]}
    rows = in_categories(problems)
    spec = task(1, has_categories=True)
    made = preparation(character_tokenizer, spec, rows, max_seq_len=14, truncation=truncation)
    whole = made.items()
    assert [item.request.max_new_tokens for item in whole] == [9, 2, 9, 2]
    # a prompt of 'a' may have 12 tokens, which '^3+3= 6\n1+1=' has, and one of 'b' 5
    last_five = {'drop_shots': '^7*2=', 'reference': '\n7*2='}[truncation]
    assert [text(item.request) for item in whole][:2] == [last_five, '^3+3= 6\n1+1=']
    some = made.items(rows[2:])
    assert [item.request.max_new_tokens for item in some] == [9, 2]


def test_no_room_for_a_prompt_is_an_error_with_both_numbers(character_tokenizer):
    for max_seq_len in (1, 2):
        with pytest.raises(ModelError) as raised:
            requests(character_tokenizer, task(2), max_seq_len=max_seq_len)
        assert str(raised.value).startswith(
            f't/2-shot: a generation may have 2 tokens (about as many as the longest right one), but max_seq_len is '
            f'{max_seq_len}, which leaves no tokens for the prompt; give a smaller generation_kwargs.max_new_tokens'
        )
    assert [len(request.context) for request in requests(character_tokenizer, task(2), max_seq_len=3)] == [1, 1, 1]
    given = task(generation_kwargs={'max_new_tokens': 40})
    with pytest.raises(
        ModelError, match=r'may have 40 tokens \(generation_kwargs\.max_new_tokens\), but max_seq_len is 40,'
    ):
        requests(character_tokenizer, given, max_seq_len=40)


def text(request) -> str:
    return ''.join(map(chr, request.context)).replace('\1', '^')


WHOLE = '^2+2= 4\n3+3= 6\n1+1='  # 19 tokens


@pytest.mark.parametrize(
    ('spec', 'max_seq_len', 'expected'),
    [
        (task(2), 21, WHOLE),
        (task(2), 20, '^3+3= 6\n1+1='),  # 12 tokens
        (task(2), 14, '^3+3= 6\n1+1='),
        (task(2), 13, '^1+1='),
        (task(2), 7, '^1+1='),
        (task(2), 6, '^+1='),  # without shots still too long: the question is cut
        (task(2, generation_kwargs={'max_new_tokens': 5}), 24, WHOLE),
        (task(2, generation_kwargs={'max_new_tokens': 5}), 23, '^3+3= 6\n1+1='),
    ],
)
def test_whole_shots_go_until_prompt_and_reply_fit(character_tokenizer, spec, max_seq_len: int, expected: str):
    """Fix 4: the first shots go, as many as must."""
    made = requests(character_tokenizer, spec, max_seq_len=max_seq_len)
    assert text(made[0]) == expected
    assert made[0].truncated == (expected != WHOLE)
    for request in made:
        assert request.length == len(request.context) + request.max_new_tokens <= max_seq_len
        assert request.unscorable is None


def test_the_references_truncation_cuts_tokens_from_the_left(character_tokenizer):
    keys = {'max_seq_len': 20, 'truncation': 'reference'}
    assert text(requests(character_tokenizer, task(2), **keys)[0]) == WHOLE[1:]
    assert requests(character_tokenizer, task(2), **keys)[0].truncated
    assert text(requests(character_tokenizer, task(2), **{**keys, 'max_seq_len': 9})[0]) == ' 6\n1+1='  # 7 tokens
    whole = requests(character_tokenizer, task(2), **{**keys, 'max_seq_len': 21})[0]
    assert text(whole) == WHOLE and not whole.truncated


@pytest.mark.parametrize('max_new_tokens', [15, 400])
def test_the_references_truncation_leaves_room_for_the_longest_answer_alone(character_tokenizer, max_new_tokens: int):
    """llm-foundry 0.22's `padding_size`, whatever max_new_tokens is: 20 less bos and a character."""
    spec = task(2, generation_kwargs={'max_new_tokens': max_new_tokens})
    made = requests(character_tokenizer, spec, max_seq_len=20, truncation='reference')
    assert text(made[0]) == WHOLE[1:] and made[0].truncated
    assert {request.max_new_tokens for request in made} == {max_new_tokens}
    with pytest.raises(ModelError, match='may have 2 tokens'):
        requests(character_tokenizer, spec, max_seq_len=2, truncation='reference')


def test_a_context_without_tokens_is_unscorable():
    class Silent:
        eos_token_id = None

        def __call__(self, texts, *, add_special_tokens, **_):
            return {'input_ids': [[7] * len(text.strip('?')) for text in texts]}

    made = requests(Silent(), task(), [Problem('??', ('2',), None), Problem('1', ('2',), None)])
    assert [request.unscorable for request in made] == [
        'no context token is left to predict the continuation from',
        None,
    ]


def test_requests_carry_the_stops_and_how_tokens_are_drawn(character_tokenizer):
    (first, *_) = requests(character_tokenizer, task())
    assert (first.stops, first.sampling) == (StopRule(answer_end='\n'), Sampling())
    (first, *_) = requests(character_tokenizer, task(), semantics='reference')
    assert first.stops == StopRule(as_pattern=True)
    drawn = {'do_sample': True, 'temperature': 2, 'top_p': 0.5, 'top_k': 3, 'seed': 9}
    (first, *_) = requests(character_tokenizer, task(generation_kwargs=drawn))
    assert first.sampling == Sampling(temperature=2.0, top_p=0.5, top_k=3, seed=9)
    # what is not said is as in transformers, and the seed is that of the shots
    (first, *_) = requests(character_tokenizer, task(generation_kwargs={'do_sample': True}))
    assert first.sampling == Sampling(temperature=1.0, top_p=1.0, top_k=50, seed=1234)
    (first, *_) = requests(character_tokenizer, task(generation_kwargs={'do_sample': False}))
    assert first.sampling == Sampling()


@pytest.mark.parametrize(
    'changed',
    [
        Problem('1+1=', ('2', 'twos'), 'One and one.'),
        Problem('1+1=', ('2', 'two', 'II'), 'One and one.'),
        Problem('1+1=', ('two', '2'), 'One and one.'),
        Problem('1+1=', ('2', 'two'), 'One, and one.'),
        Problem('1+1=', ('2', 'two'), None),
    ],
    ids=str,
)
@pytest.mark.parametrize('num_shots', [0, 2])
def test_a_change_of_an_alias_or_a_thought_is_another_entry_of_the_cache(
    character_tokenizer, changed: Problem, num_shots: int
):
    """It may change how long a reply may be, also where no shot shows it."""
    names = [
        describe(preparation(character_tokenizer, with_thoughts(num_shots), examples([first, *THOUGHTS[1:]]))).name
        for first in (THOUGHTS[0], changed, THOUGHTS[0])
    ]
    assert names[0] != names[1] and names[0] == names[2]
