"""The tables of docs/validation.md and of the README, from the results of `make real`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from real_rows import AGREEMENT_ROWS, GEMMA3, SMOLLM2

Results = Mapping[str, Any]

NAMES = {SMOLLM2: 'SmolLM2-135M-Instruct', GEMMA3: 'Gemma 3 270M'}
OURS, LM_EVAL, FOUNDRY = 'ours', 'lm_eval', 'llm_foundry'
OURS_BESIDE_FOUNDRY = 'ours_beside_llm_foundry'
NONE = ''
QUANTIZATION_POINTS = 2.0  # that weights of four bits may cost
MAX_SHOWN = 60  # characters of a generation


def write_page(results: Results, pages: Sequence[Path], record: Path) -> None:
    """Write each table between its marks in the pages, and the results beside them."""
    for page in pages:
        page.write_text(with_tables(page.read_text('utf-8'), results), 'utf-8')
    record.write_text(json.dumps(results, indent=1) + '\n', 'utf-8')


def with_tables(text: str, results: Results) -> str:
    """Return a page with its tables made anew.

    Each stands between `<!-- table: NAME -->` and `<!-- end of table -->`.
    """
    pattern = re.compile(r'(<!-- table: (\w+) -->\n).*?(<!-- end of table -->)', re.DOTALL)

    def replaced(match: re.Match[str]) -> str:
        return f'{match[1]}{TABLES[match[2]](results)}\n{match[3]}'

    return pattern.sub(replaced, text)


def agreement_table(results: Results) -> str:
    """Return what each row's predictions agree with."""
    rows = []
    for result in results['agreement'].values():
        lm_eval, foundry = result[LM_EVAL], result.get(FOUNDRY)
        generates = 'choices' not in lm_eval
        items_alike = lm_eval['items'] if generates else lm_eval['items_alike']
        equal_alike = lm_eval['equal'] if generates else lm_eval['equal_alike']
        rows.append(
            [
                NAMES[result['model']],
                result['row'],
                lm_eval['items'],
                'generated' if generates else lm_eval['choices'],
                f'{equal_alike} of {items_alike}',
                NONE if generates else f'{lm_eval["largest_distance"]:.1e}',
                f'{foundry["equal"]} of {foundry["items"]}' if foundry else NONE,
            ]
        )
    heads = ['model', 'task', 'items', 'choices', "equal to lm-eval's", 'nats off, at most', "equal to llm-foundry's"]
    return table(heads, rows)


def totals_table(results: Results) -> str:
    """Return the sums over all rows."""
    of_lm_eval = [result[LM_EVAL] for result in results['agreement'].values()]
    of_foundry = [result[FOUNDRY] for result in results['agreement'].values() if FOUNDRY in result]
    scored = [row for row in of_lm_eval if 'choices' in row]
    generated = [row for row in of_lm_eval if 'choices' not in row]
    rows = [
        share_row('scored items, lm-eval', sum_of(scored, 'equal_alike'), sum_of(scored, 'items_alike')),
        share_row('generations, lm-eval', sum_of(generated, 'equal'), sum_of(generated, 'items')),
        share_row(
            'items, llm-foundry (`semantics: reference`)', sum_of(of_foundry, 'equal'), sum_of(of_foundry, 'items')
        ),
    ]
    num_choices, num_alike = sum_of(scored, 'choices'), sum_of(scored, 'choices_alike')
    note = f'{num_alike:,} of {num_choices:,} scored choices have the same tokens in ours and in lm-eval.'
    return f'{table(["predictions", "equal", "of", "share"], rows)}\n\n{note}'


def share_row(name: str, equal: int, total: int) -> list[Any]:
    """Return a row with a share in percent."""
    return [name, f'{equal:,}', f'{total:,}', f'{100 * equal / total:.2f} %' if total else NONE]


def differences_table(results: Results) -> str:
    """Return each item whose prediction is another one, with what is known about it."""
    rows = []
    for result in results['agreement'].values():
        for other in (LM_EVAL, FOUNDRY):
            for difference in result.get(other, {}).get('differing', ()):
                rows.append(
                    [
                        NAMES[result['model']],
                        f'{result["row"]}, item {difference["item"]}',
                        other.replace('_', '-'),
                        shown(difference['ours']),
                        shown(difference['theirs']),
                        margin(difference),
                    ]
                )
    if not rows:
        return 'No prediction differs.'
    return table(['model', 'item', 'other', 'ours', 'theirs', 'nats between the best two of ours'], rows)


def shown(prediction: Any) -> str:
    """Return a prediction as a cell: an index, or the beginning of a text."""
    if not isinstance(prediction, str):
        return str(prediction)
    text = repr(prediction)
    cut = text if len(text) <= MAX_SHOWN else f'{text[:MAX_SHOWN]}...'
    return f'`{cut}`'.replace('|', '\\|')


def margin(difference: Mapping[str, Any]) -> str:
    """Return by how much our best choice is ahead of the next, as sums, if it was scored."""
    if 'logprobs' not in difference or len(difference['logprobs'][0]) == 1:
        return NONE
    best, second = sorted(difference['logprobs'][0], reverse=True)[:2]
    return f'{best - second:.1e}'


def seconds_table(results: Results) -> str:
    """Return processor seconds per item, and how many times as long the others take."""
    rows = []
    for result in results['agreement'].values():
        seconds = result['seconds']
        foundry = seconds.get(FOUNDRY)
        rows.append(
            [
                NAMES[result['model']],
                result['row'],
                f'{seconds[OURS]:.3f}',
                f'{seconds[LM_EVAL]:.3f}',
                f'{seconds[LM_EVAL] / seconds[OURS]:.1f}',
                f'{seconds[OURS_BESIDE_FOUNDRY]:.3f}' if foundry else NONE,
                f'{foundry:.3f}' if foundry else NONE,
                f'{foundry / seconds[OURS_BESIDE_FOUNDRY]:.1f}' if foundry else NONE,
                result[FOUNDRY]['padded_to'] if foundry else NONE,
            ]
        )
    of_lm_eval, of_foundry = ratios(results)
    rows.append(['geometric mean', '', '', '', mean_of(of_lm_eval), '', '', mean_of(of_foundry), ''])
    heads = ['model', 'task', 'ours', 'lm-eval', 'times', 'ours, reference', 'llm-foundry', 'times', 'padded to']
    return table(heads, rows)


def ratios(results: Results) -> tuple[list[float], list[float]]:
    """Return lm-eval's and llm-foundry's seconds over ours, of each row."""
    seconds = [result['seconds'] for result in results['agreement'].values()]
    of_lm_eval = [row[LM_EVAL] / row[OURS] for row in seconds]
    of_foundry = [row[FOUNDRY] / row[OURS_BESIDE_FOUNDRY] for row in seconds if FOUNDRY in row]
    return of_lm_eval, of_foundry


def mean_of(values: Sequence[float]) -> str:
    """Return a geometric mean as a cell."""
    return f'{geometric_mean(values):.1f}' if values else NONE


def published_table(results: Results) -> str:
    """Return each score beside the published one, with the distance that is allowed."""
    rows = []
    for model, result in results['published'].items():
        for score in result['scores']:
            difference = score['percent'] - score['published']
            allowed = 2 * score['stderr'] + QUANTIZATION_POINTS
            rows.append(
                [
                    NAMES[model],
                    f'{score["label"]}, {score["num_shots"]}-shot',
                    score['form'],
                    SCORES[score['score']],
                    score['items'],
                    f'{score["percent"]:.1f} ± {score["stderr"]:.1f}',
                    score['published'],
                    f'{difference:+.1f}',
                    f'{allowed:.1f}' + ('' if abs(difference) <= allowed else ', exceeded'),
                ]
            )
    heads = ['model', 'task', 'prompt form', 'score', 'items', 'ours, %', 'published', 'difference', 'allowed']
    return table(heads, rows)


SCORES = {'sum': 'acc', 'per_character': 'acc_norm', 'accuracy': 'accuracy'}


def gauntlet_table(results: Results) -> str:
    """Return the scores of all tasks of the Gauntlet, a column for each model."""
    by_model = {model: result['scores'] for model, result in results['gauntlet'].items()}
    tasks = sorted({task for scores in by_model.values() for task in scores})
    rows = []
    for task in tasks:
        row: list[Any] = [task]
        for scores in by_model.values():
            score = scores.get(task)
            row.append(f'{score["accuracy"]:.3f} ({score["items"]})' if score else NONE)
        rows.append(row)
    return table(['task', *(f'{NAMES[model]} (items)' for model in by_model)], rows)


def skipped_list(results: Results) -> str:
    """Return a line for each reason to leave something out, and one for all that the results lack."""
    lines = [f'- {reason}' for reason in results['skipped']]
    missing = [row.key for row in AGREEMENT_ROWS if row.key not in results['agreement']]
    missing += [
        f'{model}/{part}' for part in ('published', 'gauntlet') for model in NAMES if model not in results[part]
    ]
    if missing:
        names = ', '.join(f'`{name}`' for name in missing)
        lines.append(f'- Not run for this record, for lack of processor time: {names}.')
    return '\n'.join(lines) if lines else 'Nothing was skipped.'


def readme_table(results: Results) -> str:
    """Return the figures of the README."""
    of_lm_eval, of_foundry = ratios(results)
    lm_eval = [result[LM_EVAL] for result in results['agreement'].values()]
    foundry = [result[FOUNDRY] for result in results['agreement'].values() if FOUNDRY in result]
    scored = [row for row in lm_eval if 'choices' in row]
    generated = [row for row in lm_eval if 'choices' not in row]
    equal_to_lm_eval = sum_of(scored, 'equal_alike') + sum_of(generated, 'equal')
    of_items = sum_of(scored, 'items_alike') + sum_of(generated, 'items')
    rows = [
        [
            'same predictions',
            f'{equal_to_lm_eval:,} of {of_items:,}',
            f'{sum_of(foundry, "equal")} of {sum_of(foundry, "items")}',
        ],
        ['processor time, times ours', mean_of(of_lm_eval), mean_of(of_foundry)],
    ]
    models = dict.fromkeys(NAMES[result['model']] for result in results['agreement'].values())
    if not foundry:
        return 'Not measured.'
    lengths = [row['padded_to'] for row in foundry]
    padding = f'llm-foundry pads to {min(lengths)} to {max(lengths)} tokens here, not to its 1,024'
    sentence = f'With {" and ".join(models)}, on the same items, in one thread of a CPU; {padding}:'
    return f'{sentence}\n\n{table(["", "lm-eval", "llm-foundry"], rows)}'


def sum_of(rows: Sequence[Mapping[str, Any]], key: str) -> int:
    """Return the sum of a number over rows."""
    return sum(row[key] for row in rows)


def table(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a table in Markdown, or that there is nothing to show."""
    if not rows:
        return 'Not measured.'
    lines = [heads, ['---'] * len(heads), *rows]
    return '\n'.join(f'| {" | ".join(map(str, line))} |' for line in lines)


def conditions(results: Results) -> str:
    """Return the days, the machine and the versions of the results."""
    parts = ('agreement', 'published', 'gauntlet')
    days = sorted({result['date'] for part in parts for result in results[part].values()})
    machine = results['machine']
    versions = f'torch {machine["torch"]}, transformers {machine["transformers"]}'
    load = f'load average {machine["load_average"]} at the end, of other work'
    return f'Measured on {" and ".join(days)}: {machine["processor"]}, {machine["cores"]} cores ({load}); {versions}.'


TABLES = {
    'conditions': conditions,
    'agreement': agreement_table,
    'totals': totals_table,
    'differences': differences_table,
    'seconds': seconds_table,
    'published': published_table,
    'gauntlet': gauntlet_table,
    'skipped': skipped_list,
    'readme': readme_table,
}
