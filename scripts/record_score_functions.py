"""Record what the functions of lm-eval 0.4.13's SCORE tasks return for made-up generations, for the tests of ours.

    .venv-reference/bin/python scripts/record_score_functions.py [--out FILE]

Runs in the environment of `requirements/reference.txt`; no data are read. lm-eval's own functions make the variants of
made-up questions, extract the answers from made-up generations and aggregate them; a generation is a function of the
options as shown, so that the same prompt has the same generation.

`tests/fixtures/score/functions.json`:

    lm_eval         version
    letters[]       generation, extracted answer
    math_equal[]    earlier, later, 1 if equal; for all pairs of answers in the cases, without null
    cases[]
        data_set, perturbation
        questions[]     file, row, own (the gold's label), answers by variant
        consistency_rate    of all files: mean over them weighted by number of prompts; non_greedy: the summarizer's
"""

import argparse
import itertools
import json
import random
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import datasets
from lm_eval.api.metrics import aggregate_subtask_metrics
from lm_eval.tasks.score import non_greedy_summarizer, utils
from lm_eval.tasks.score.agi_eval import utils_agieval
from lm_eval.tasks.score.math import utils_math
from lm_eval.tasks.score.math.math_grader import math_equal
from lm_eval.tasks.score.mmlu_pro import utils_mmlu_pro
from recording import FIXTURES

LETTERS = 'ABCDEFGHIJ'
SEEDS = range(1, 6)
MODULES = {'mmlu_pro': utils_mmlu_pro, 'agieval': utils_agieval, 'math': utils_math}
FILES = {'mmlu_pro': [None], 'agieval': ['aqua-rat', 'sat-en', 'lsat-ar'], 'math': ['algebra', 'geometry']}
SIZES = {'mmlu_pro': (3, 4, 4, 9, 10), 'agieval': (5,), 'math': (4,)}  # numbers of options
CONSISTENCY = {'prompt': 'consistency_rate', 'option_order': 'options_consistency_rate'}
MATH_ANSWERS = (None, '', '5', '5.0', '500', '0.05', '\\frac12', '0.5', '50\\%', 'x', 'x=4', '4', '(1,2)', '1,2', '2,1')
PIECES = (
    *'ABCDEJabi',
    'the best answer is',
    'The best answer is ',
    'THE BEST ANSWER IS ',
    'the best answer is  ',
    *' \n\t\r\xa0.:()[]',
    '**',
    '$',
    '\\boxed{',
    '}',
    "'",
    '"',
    '_',
    '-',
    '\\n',
    'option',
    'and',
    'or',
    'man',
    '12',
    *'\u00e9\u00df\u0130\u212a\ufb01\uff22\u0412\u2019',
    'Best answer is B',
    ' is ',
    'The',
    'best answer is A',
    '(the_answer_letter)',
)


def extract(text: str) -> str:
    """Return a generation's answer, as every task with letters extracts it."""
    answer = getattr(utils, '__postprocess_pred')(text)
    return utils.translate_model_answer_to_labels(answer, labels=list(LETTERS), option_format='\n{letter}: {option}')


def made_up_generation(draw: random.Random) -> str:
    return ''.join(draw.choices(PIECES, k=draw.randint(0, 9)))


def made_up_questions(data_set: str, draw: random.Random, case: int) -> list[dict[str, Any]]:
    questions = []
    for file in FILES[data_set]:
        for row in range(draw.randint(1, 5)):
            sizes = (4,) if file == 'sat-en' else SIZES[data_set]
            size = draw.choice(sizes)
            gold = draw.randrange(size)
            questions.append({
                'case': case,
                'file': file or '',
                'row': row,
                'question': 'q',
                'question_id': case * 1000 + row,
                'category': draw.choice(('law', 'physics', 'math')),
                'options': [f'{place}' for place in range(size)],
                'answer_index': gold,
                'answer': LETTERS[gold],
                'skill': draw.choice((0.1, 0.5, 0.95)),
                'number': draw.choice(MATH_ANSWERS[2:]),
            })  # fmt: skip
    return questions


def generation_for(doc: Mapping[str, Any], seed: int) -> str:
    """Return a generation that depends only on the question as asked and the seed."""
    asked = (doc['case'], doc['file'], doc['row'], doc['options'], doc.get('prompt_id'), seed)
    draw = random.Random(repr(asked))
    right = draw.random() < doc['skill']
    if doc['number_asked']:
        answer = doc['number'] if right else draw.choice(MATH_ANSWERS)
        return 'no idea' if answer is None else f'so \\boxed{{{answer}}}'
    letter = LETTERS[doc['answer_index']] if right else draw.choice(LETTERS[: len(doc['options']) + 1])
    form = draw.choice(
        ('{}', 'The best answer is {}', 'The best answer is ({}).', 'The best answer is {}') * 2 + ('', '?')
    )
    return form.format(letter)


def variants_of(data_set: str, perturbation: str, questions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return lm-eval's documents of all questions, in its order."""
    module = MODULES[data_set]
    columns = {key: [question[key] for question in questions] for key in questions[0]}
    rows = datasets.Dataset.from_dict(columns)
    if data_set == 'math':
        rows = rows.map(lambda row: {'problem': row['question'], 'solution': f'\\boxed{{{row["number"]}}}'})
    make = getattr(module, f'{perturbation}_robustness_process_docs')
    docs = make(rows).to_list()
    return [{**doc, 'number_asked': data_set == 'math'} for doc in docs]


def run_case(data_set: str, perturbation: str, docs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a case of the fixture: its questions with the answers, and lm-eval's consistency rate of them."""
    docs_of_file: dict[str, list[dict[str, Any]]] = {}
    for doc in docs:
        docs_of_file.setdefault(doc['file'], []).append(doc)
    questions: list[dict[str, Any]] = []
    rates: list[float | None] = []
    answers_by_seed: list[list[Any]] = []  # of each question
    for file_docs in docs_of_file.values():
        answers, rate = run_file(data_set, perturbation, file_docs)
        questions += questions_of(data_set, perturbation, file_docs, answers)
        rates.append(rate)
        if perturbation == 'non_greedy':
            for place in range(len(file_docs)):
                answers_by_seed.append([answers[place, f'non_greedy:{seed}'] for seed in SEEDS])
    if perturbation == 'non_greedy':
        name = 'calculate_math_consistency_rate' if data_set == 'math' else 'calculate_consistency_rate'
        rate = getattr(non_greedy_summarizer, name)(answers_by_seed)
    else:
        rate = aggregate_subtask_metrics(rates, [len(file_docs) for file_docs in docs_of_file.values()])
    return {'data_set': data_set, 'perturbation': perturbation, 'questions': questions, 'consistency_rate': rate}


def run_file(data_set: str, perturbation: str, docs: list[dict[str, Any]]) -> tuple[dict, float | None]:
    """Return the answers of one file by place and variant, and the rate that its task logs, if it does."""
    module = MODULES[data_set]
    answers: dict[tuple[int, str], Any] = {}
    logged = []
    if perturbation == 'non_greedy':
        name = 'non_greedy_macro_accuracy' if data_set == 'mmlu_pro' else 'non_greedy_accuracy'
        for seed in SEEDS:
            for place, doc in enumerate(docs):
                metrics = module.non_greedy_robustness_process_results(doc, [generation_for(doc, seed)])
                answers[place, f'non_greedy:{seed}'] = metrics[name][1]
        return answers, None
    process = getattr(module, 'process_results', None) or getattr(module, f'{perturbation}_robustness_process_results')
    for place, doc in enumerate(docs):
        entry = process(doc, [generation_for(doc, 0)])[CONSISTENCY[perturbation]]
        logged.append(entry)
        answers[place, variant_of(perturbation, doc)] = entry[1] if data_set == 'math' else entry[2]
    if data_set == 'math':
        name = 'math_prompt_consistency_rate'
    else:
        name = {'prompt': 'prompt_consistency_rate', 'option_order': 'options_consistency_rate'}[perturbation]
    return answers, getattr(module, name)(logged)


def variant_of(perturbation: str, doc: Mapping[str, Any]) -> str:
    return f'{perturbation}:{doc["prompt_id"] if perturbation == "prompt" else doc["always_same_option"]}'


def questions_of(data_set: str, perturbation: str, docs: list[dict[str, Any]], answers: dict) -> list[dict[str, Any]]:
    """Return our items: in option order without labels that a question lacks, and with an answer to E."""
    question_of_row: dict[int, dict[str, Any]] = {}
    for (place, variant), answer in answers.items():
        doc = docs[place]
        question = question_of_row.setdefault(doc['row'], {
            'file': doc['file'] or None,
            'row': doc['row'],
            'own': LETTERS[doc.get('original_answer_index', doc['answer_index'])],
            'answers': {},
        })  # fmt: skip
        label = variant.partition(':')[2]
        if perturbation == 'option_order' and LETTERS.index(label) >= len(doc['options']):
            continue
        question['answers'][variant] = answer
        if perturbation == 'option_order' and len(doc['options']) == 5 and data_set == 'agieval':
            question['answers']['option_order:E'] = 'E'
    return list(question_of_row.values())


def cases(count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield `count` cases of each dataset and perturbation."""
    for data_set, module in MODULES.items():
        for perturbation in ('option_order', 'prompt', 'non_greedy'):
            if not hasattr(module, f'{perturbation}_robustness_process_docs'):
                continue
            draw = random.Random(f'{data_set} {perturbation} {seed}')
            questions = [question for case in range(count) for question in made_up_questions(data_set, draw, case)]
            docs: dict[int, list[dict[str, Any]]] = {}
            for doc in variants_of(data_set, perturbation, questions):
                docs.setdefault(doc['case'], []).append(doc)
            for group in docs.values():
                yield run_case(data_set, perturbation, group)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
    parser.add_argument('--out', type=Path, default=FIXTURES / 'score' / 'functions.json')
    out = parser.parse_args().out
    datasets.disable_progress_bars()
    draw = random.Random(0)
    generations = [made_up_generation(draw) for _ in range(500)]
    pairs = itertools.product(MATH_ANSWERS[1:], repeat=2)
    fixture = {
        'lm_eval': version('lm_eval'),
        'letters': [[text, extract(text)] for text in generations],
        'math_equal': [[earlier, later, int(math_equal(earlier, later))] for earlier, later in pairs],
        'cases': list(cases(12, 0)),
    }
    lines = json.dumps(fixture, separators=(',', ':')).replace('{"data_set"', '\n{"data_set"')
    out.write_text(lines + '\n', encoding='utf-8')
    print(f'{out}: {len(lines) + 1} bytes')


if __name__ == '__main__':
    main()
