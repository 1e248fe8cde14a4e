"""Cases of `fixtures/score/functions.json` as our types, and where our numbers differ from the recorded ones."""

from collections.abc import Callable, Mapping
from typing import Any

from reference_accuracy import reference_accuracy

from llmfoundry_gauntlet.metrics.consistency import VariantResult, reference_consistency_rate

LABELS = {'mmlu_pro': 'ABCDEFGHIJ', 'agieval': 'ABCD', 'math': ''}


def results_of(case: Mapping[str, Any]) -> list[VariantResult]:
    """Return the item results of a case, scored by the reference's letter."""
    return [
        VariantResult(
            question=(question['file'], question['row']),
            category=question['category'],
            variant=variant,
            gold=(gold := gold_of(case, question, variant)),
            score=float(answer == gold) if gold else float(question['credits'][variant]),
            answer=answer,
            reference_answer=answer,
        )
        for question in case['questions']
        for variant, answer in question['answers'].items()
    ]


def gold_of(case: Mapping[str, Any], question: Mapping[str, Any], variant: str) -> str:
    if case['data_set'] == 'math':
        return ''
    return variant.partition(':')[2] if case['perturbation'] == 'option_order' else question['own']


def differences(case: Mapping[str, Any], math_equal: Callable[[str, str], bool]) -> list[str]:
    """Return the numbers that differ by more than 1e-12: name, ours, recorded."""
    results = results_of(case)
    own = {(question['file'], question['row']): question['own'] for question in case['questions']}
    order = {'labels': LABELS[case['data_set']], 'own_labels': own}
    equal = {'equal': math_equal} if case['data_set'] == 'math' else {}
    accuracy = reference_accuracy(results, macro=case['data_set'] == 'mmlu_pro', **order)
    rate = reference_consistency_rate(results, **order, **equal).value
    pairs = [('consistency_rate', rate, case['consistency_rate'])]
    recorded = {'overall': case['overall'], 'micro': case.get('micro', accuracy.micro)}
    recorded |= {file or None: values for file, values in case['by_file'].items()}
    ours = {'overall': accuracy.overall, 'micro': accuracy.micro, **accuracy.by_file}
    assert list(ours) == list(recorded) or set(ours) == set(recorded)
    for name, values in recorded.items():
        assert values.keys() == ours[name].keys()
        pairs += [(f'{name} {variant}', ours[name][variant], value) for variant, value in values.items()]
    return [f'{name}: {one} {other}' for name, one, other in pairs if not abs(one - other) <= 1e-12]
