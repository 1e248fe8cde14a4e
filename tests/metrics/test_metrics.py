import pytest
from clustered_items import item as plain_item

from llmfoundry_gauntlet.metrics.keys import metric_stream
from llmfoundry_gauntlet.metrics.metrics import accuracy, task_score
from llmfoundry_gauntlet.types import ItemResult

METRIC = 'InContextLearningLMAccuracy'


def item(row: int, credit: float | None, category: str | None = None, *, truncated: bool = False) -> ItemResult:
    return plain_item(row, credit, task='t/3-shot', category=category, truncated=truncated)


def test_accuracy_is_the_mean_score():
    score = task_score('t/3-shot', [accuracy(METRIC)], [item(0, 1.0), item(1, 0.0), item(2, 0.25, truncated=True)])
    assert score.metrics[METRIC].value == pytest.approx(1.25 / 3)
    assert (score.num_items, score.num_unscored, score.num_truncated) == (3, 0, 1)


def test_a_task_with_categories_is_the_plain_mean_over_them():
    results = [item(0, 1.0, 'b'), item(1, 0.0, 'a'), item(2, 0.0, 'a'), item(3, 1.0, 'a')]
    score = task_score('t/3-shot', [accuracy(METRIC)], results)
    assert score.metrics[METRIC].value == pytest.approx((1 / 3 + 1) / 2)
    assert list(score.categories) == ['a', 'b']


def test_an_unscored_item_makes_accuracy_absent():
    score = task_score('t/3-shot', [accuracy(METRIC)], [item(0, 1.0, 'a'), item(1, None, 'b')])
    assert score.metrics[METRIC].value is None
    assert score.metrics[METRIC].reason == '1 of 2 items unscored: nan'
    assert score.categories['a'].metrics[METRIC].value == 1
    assert task_score('t/3-shot', [accuracy(METRIC)], [item(0, 1.0), item(1, None)]).metrics[METRIC].value is None


def test_the_metric_stream_has_upstream_keys_without_absent_values():
    scores = {'t/3-shot': task_score('t/3-shot', [accuracy(METRIC)], [item(0, 1.0, 'a'), item(1, None, 'b')])}
    assert metric_stream(scores, None, {}, {'t/3-shot': 1.5}) == {
        f'metrics/t/3-shot/a/{METRIC}': 1.0,
        'gauntlet/seconds': 1.5,
        'gauntlet/seconds/t/3-shot': 1.5,
        'gauntlet/items': 2,
        'gauntlet/truncated_items': 0,
        'gauntlet/unscored_items': 1,
    }
