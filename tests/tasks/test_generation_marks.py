"""Replies to generation tasks marked, and the metrics of their tasks, by hand."""

import dataclasses

import pytest

from llmfoundry_gauntlet.evaluation.suite import load_suite
from llmfoundry_gauntlet.metrics.keys import metric_stream
from llmfoundry_gauntlet.metrics.metrics import task_score
from llmfoundry_gauntlet.tasks import metrics_of
from llmfoundry_gauntlet.tasks.encode import Encoder
from llmfoundry_gauntlet.tasks.generation import Problem
from llmfoundry_gauntlet.tasks.items import Preparation, item_result
from llmfoundry_gauntlet.types import Example, Generation, Item, ItemKey, ItemResult

ACCURACY = 'InContextLearningGenerationExactMatchAccuracy'
PROBLEM = Problem('1+1=', ('2', 'two'), 'One and one.')


def with_thoughts(**keys):
    """As gsm8k is asked."""
    task = {
        'label': 't',
        'dataset_uri': 'rows.jsonl',
        'num_fewshot': [0],
        'icl_task_type': 'generation_task_with_answers',
        'cot_delimiter': ' #### ',
        'continuation_delimiter': '\nA: ',
        'prelimiter': 'Q: ',
    }
    return load_suite([{**task, **keys}]).tasks[0]


def item_of(tokenizer, spec, content: Problem) -> Item:
    examples = [Example(row=0, content=content)]
    (item,) = Preparation(task=spec, examples=examples, encoder=Encoder(tokenizer), max_seq_len=100).items()
    return item


KEY = ItemKey('t/0-shot', 0)


def result(
    character_tokenizer, reply: str, spec=None, content: Problem = PROBLEM, *, reference: bool = False, **keys
) -> ItemResult:
    """The item of one problem, marked by this reply."""
    spec = dataclasses.replace(spec or with_thoughts(), semantics='reference' if reference else 'corrected')
    item = item_of(character_tokenizer, spec, content)
    output = Generation(key=KEY, text=reply, **{'num_tokens': 7, 'is_cut': False, **keys})
    return item_result(item, output, spec)


def marks_of(found: ItemResult) -> tuple:
    return (found.credit, *found.marks.values())


def test_a_reply_is_cut_at_its_stop_and_its_answer_is_marked(character_tokenizer):
    found = result(character_tokenizer, 'One and one. #### 2\nQ: 2+2=\nA: #### 4')
    assert (found.text, found.answer, found.gold) == ('One and one. #### 2', '2', '2')
    assert (found.status, found.reason, found.num_tokens, found.predicted, found.logprobs) == (
        'scored',
        None,
        (7,),
        None,
        None,
    )
    assert found.marks == {'StrictMatch': 1.0, 'NumericMatch': 1.0, 'CutShare': 0.0}
    assert found.credit == 1


@pytest.mark.parametrize(
    ('reply', 'expected'),
    [
        ('so #### two', (1, 1, 1, 0)),
        ('so #### 2.0', (1, 0, 1, 0)),
        ('so #### $2.', (1, 1, 1, 0)),
        ('so #### 22', (1, 0, 0, 0)),  # the prefix accepts it
        ('so #### about 2', (0, 0, 1, 0)),
        ('so #### 4', (0, 0, 0, 0)),
        ('2', (1, 1, 1, 0)),  # without a thought all of it is the answer
        ('2 and more', (1, 0, 1, 0)),
        ('so it is 2', (0, 0, 1, 0)),
    ],
)
def test_accuracy_strict_and_numeric_match_of_a_reply(character_tokenizer, reply: str, expected: tuple):
    assert marks_of(result(character_tokenizer, reply)) == expected


def test_an_empty_reply_and_an_empty_answer_are_wrong_and_say_so(character_tokenizer):
    found = result(character_tokenizer, '')
    assert marks_of(found) == (0, 0, 0, 0)
    assert (found.status, found.reason, found.text, found.answer) == ('scored', 'empty reply', '', '')
    assert result(character_tokenizer, ' \n ').reason == 'empty reply'
    found = result(character_tokenizer, 'One and one. #### ')
    assert marks_of(found) == (0, 0, 0, 0) and found.reason == 'empty answer'


def test_a_reply_that_the_limit_cut_is_marked_and_counted(character_tokenizer):
    found = result(character_tokenizer, 'One and one. #### 2', is_cut=True)
    assert marks_of(found) == (1, 1, 1, 1) and found.reason == 'cut at the token limit'
    assert result(character_tokenizer, '', is_cut=True).reason == 'empty reply; cut at the token limit'


def test_of_a_reply_from_elsewhere_it_is_not_known_whether_it_was_cut(character_tokenizer):
    found = result(character_tokenizer, 'so #### 2', is_cut=None)
    assert found.marks == {'StrictMatch': 1.0, 'NumericMatch': 1.0} and found.reason is None


def test_a_reply_from_logits_that_are_no_numbers_is_unscored_and_scored_by_the_reference(character_tokenizer):
    """Fix 1."""
    found = result(character_tokenizer, 'so #### 2', is_finite=False)
    assert (found.credit, found.status, found.marks) == (None, 'unscored', {})
    assert found.reason == 'the model returned logits that are not finite numbers'
    assert found.text == 'so #### 2'
    assert result(character_tokenizer, 'so #### 2', is_finite=False, reference=True).credit == 1


def test_the_reference_marks_a_reply_by_its_own_rules(character_tokenizer):
    empty = Problem('?', ('$a$',), 'So.')
    assert result(character_tokenizer, 'so #### b', content=empty).credit == 0
    assert result(character_tokenizer, 'so #### b', content=empty, reference=True).credit == 1
    # it runs on, and the last answer counts
    reply = 'so #### 4\nQ: 1+1=\nA: so #### 2'
    assert result(character_tokenizer, reply).credit == 0
    found = result(character_tokenizer, reply, reference=True)
    assert (found.credit, found.text) == (1, reply)
    # its stops are expressions
    spec = with_thoughts(early_stopping_criteria=['o.'])
    assert result(character_tokenizer, 'two #### 2', spec).text == 'two #### 2'
    assert result(character_tokenizer, 'two #### 2', spec, reference=True).text == 'tw'


def test_without_normalisation_an_answer_keeps_its_signs(character_tokenizer):
    spec = with_thoughts(do_normalization=False)
    assert marks_of(result(character_tokenizer, 'so #### -2', spec)) == (0, 0, 0, 0)
    assert marks_of(result(character_tokenizer, 'so #### -2')) == (1, 0, 0, 0)
    assert marks_of(result(character_tokenizer, 'so #### Two', spec)) == (0, 0, 0, 0)


def test_an_unscorable_item_has_no_reply(character_tokenizer):
    item = item_of(character_tokenizer, with_thoughts(), PROBLEM)
    item = dataclasses.replace(item, request=dataclasses.replace(item.request, unscorable='why'))
    found = item_result(item, None, with_thoughts())
    assert (found.status, found.reason, found.text, found.num_tokens) == ('unscored', 'why', None, None)


REPLIES = ['so #### 2', 'so #### 22', 'so #### 2.0', 'so #### 4']  # (1, 1, 1), (1, 0, 0), (1, 0, 1), (0, 0, 0)


def results(character_tokenizer, categories: str) -> list[ItemResult]:
    return [
        dataclasses.replace(
            result(character_tokenizer, reply, is_cut=row == 3),
            key=ItemKey('t/0-shot', row),
            category=category if category.strip() else None,
        )
        for row, (reply, category) in enumerate(zip(REPLIES, categories, strict=True))
    ]


def test_a_task_has_its_accuracy_and_the_means_of_its_marks(character_tokenizer):
    score = task_score('t/0-shot', metrics_of(with_thoughts()), results(character_tokenizer, '    '))
    assert {name: measure.value for name, measure in score.metrics.items()} == {
        ACCURACY: 3 / 4,
        'StrictMatch': 1 / 4,
        'NumericMatch': 2 / 4,
        'CutShare': 1 / 4,
    }
    assert score.accuracy.value == 3 / 4
    stream = metric_stream({'t/0-shot': score}, None, {}, {})
    assert stream['metrics/t/0-shot/StrictMatch'] == 1 / 4
    assert [key for key in stream if 'Accuracy' in key] == [f'metrics/t/0-shot/{ACCURACY}']


def test_with_categories_every_metric_is_the_plain_mean_over_them(character_tokenizer):
    score = task_score('t/0-shot', metrics_of(with_thoughts()), results(character_tokenizer, 'aaab'))
    assert {name: measure.value for name, measure in score.metrics.items()} == {
        ACCURACY: pytest.approx((3 / 3 + 0) / 2),
        'StrictMatch': pytest.approx((1 / 3 + 0) / 2),
        'NumericMatch': pytest.approx((2 / 3 + 0) / 2),
        'CutShare': pytest.approx((0 + 1) / 2),
    }
    assert score.categories['a'].metrics['NumericMatch'].value == pytest.approx(2 / 3)
    stream = metric_stream({'t/0-shot': score}, None, {}, {})
    assert stream['metrics/t/0-shot/b/CutShare'] == 1


def test_an_unscored_reply_leaves_no_metric_but_the_reason(character_tokenizer):
    bad = dataclasses.replace(result(character_tokenizer, 'x', is_finite=False), key=ItemKey('t/0-shot', 9))
    score = task_score('t/0-shot', metrics_of(with_thoughts()), [*results(character_tokenizer, '    '), bad])
    assert {(measure.value, measure.reason) for measure in score.metrics.values()} == {
        (None, '1 of 5 items unscored: the model returned logits that are not finite numbers')
    }
    assert list(score.metrics) == [metric.name for metric in metrics_of(with_thoughts())]


def test_where_it_is_not_known_of_all_replies_whether_they_were_cut_that_metric_alone_is_absent(character_tokenizer):
    first, *others = results(character_tokenizer, '    ')
    first = dataclasses.replace(first, marks={name: first.marks[name] for name in ('StrictMatch', 'NumericMatch')})
    score = task_score('t/0-shot', metrics_of(with_thoughts()), [first, *others])
    assert score.metrics['StrictMatch'].value == 1 / 4
    assert score.metrics['CutShare'].value is None
    assert score.metrics['CutShare'].reason == 'CutShare is not known of 1 of 4 items'
