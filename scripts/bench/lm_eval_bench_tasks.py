"""lm-eval's own task definitions over the rows of our data files, which need no hub.

A definition includes one of lm-eval's YAML files, with its prompts, functions, filters and metrics; only its data set
is replaced by local files of the same columns. Imports no lm-eval: the controller writes the files.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

LETTERS = 'ABCDE'
PASSAGES_PER_PAGE = 12  # about 1,500 tokens: some pages exceed the 2,048 of the model, most do not
FIXED = {'sampler': 'first_n'}  # the same shots for all documents
SHOT_ROWS = 200  # rows to draw shots from

JsonRow = dict[str, Any]


def of_arc(rows: Sequence[JsonRow]) -> Iterator[JsonRow]:
    """Yield documents with the columns of ARC."""
    for row in rows:
        letters = list(LETTERS[: len(row['choices'])])
        yield {
            'question': row['query'].removeprefix('Question: ').strip(),
            'choices': {'text': row['choices'], 'label': letters},
            'answerKey': letters[row['gold']],
        }


def of_piqa(rows: Sequence[JsonRow]) -> Iterator[JsonRow]:
    """Yield documents with the columns of PIQA."""
    for row in rows:
        first, second = row['choices']
        goal = row['query'].removeprefix('Question: ').strip()
        yield {'goal': goal, 'sol1': first, 'sol2': second, 'label': row['gold']}


def of_hellaswag(rows: Sequence[JsonRow]) -> Iterator[JsonRow]:
    """Yield documents with the columns of HellaSwag, whose second half of the context stays empty."""
    for row in rows:
        activity, _, context = row['query'].partition(': ')
        yield {
            'activity_label': activity,
            'ctx_a': context,
            'ctx_b': '',
            'endings': row['choices'],
            'label': str(row['gold']),
        }


def of_winogrande(rows: Sequence[JsonRow]) -> Iterator[JsonRow]:
    """Yield documents with the columns of WinoGrande from rows of the Winograd schemas.

    An option has at least one word, also where it begins the other one.
    """
    for row in rows:
        first, second = (context.split(' ') for context in row['context_options'])
        num_shared = 0
        while num_shared < min(len(first), len(second)) - 1 and first[num_shared] == second[num_shared]:
            num_shared += 1
        words = [*first[:num_shared], '_', row['continuation']]
        yield {
            'sentence': ' '.join(words),
            'option1': ' '.join(first[num_shared:]),
            'option2': ' '.join(second[num_shared:]),
            'answer': str(row['gold'] + 1),
        }


def of_boolq(rows: Sequence[JsonRow]) -> Iterator[JsonRow]:
    """Yield documents with the columns of BoolQ."""
    for row in rows:
        passage, _, question = row['query'].partition('\nQuestion: ')
        yield {
            'passage': passage.removeprefix('Passage: '),
            'question': question.removesuffix('?'),
            'label': row['gold'],
        }


def of_mmlu(rows: Sequence[JsonRow]) -> Iterator[JsonRow]:
    """Yield documents with the columns of MMLU; its choices are in the text of the question."""
    for row in rows:
        question, _, listed = row['query'].removeprefix('Question: ').partition('\nChoices\n')
        choices = []
        for letter in reversed(LETTERS[:4]):
            listed, _, choice = listed.rpartition(f'{letter}. ')
            choices.insert(0, choice.strip())
        yield {'question': question, 'choices': choices, 'answer': row['gold']}


def of_lambada(rows: Sequence[JsonRow]) -> Iterator[JsonRow]:
    """Yield documents with the columns of LAMBADA."""
    for row in rows:
        yield {'text': f'{row["context"]} {row["continuation"]}'}


def of_wikitext(rows: Sequence[JsonRow]) -> Iterator[JsonRow]:
    """Yield documents with the columns of WikiText, each made of several passages of BoolQ."""
    passages = [document['passage'] for document in of_boolq(rows)]
    for start in range(0, len(passages), PASSAGES_PER_PAGE):
        yield {'page': '\n'.join(passages[start : start + PASSAGES_PER_PAGE])}


def of_gsm8k(rows: Sequence[JsonRow]) -> Iterator[JsonRow]:
    """Yield documents with the columns of GSM8K."""
    for row in rows:
        yield {'question': row['context'], 'answer': f'{row["chain_of_thought"]}\n#### {row["answer"]}'}


@dataclass(frozen=True, slots=True, kw_only=True)
class Definition:
    """A task of lm-eval: its YAML below `lm_eval/tasks`, our file, and the documents that are made of its rows."""

    yaml: str
    file: str
    documents_of: Callable[[Sequence[JsonRow]], Iterator[JsonRow]]
    rows_per_document: int = 1


DEFINITIONS = {
    'piqa': Definition(yaml='piqa/piqa.yaml', file='commonsense_reasoning/piqa.jsonl', documents_of=of_piqa),
    'winogrande': Definition(
        yaml='winogrande/default.yaml',
        file='language_understanding/winograd_wsc.jsonl',
        documents_of=of_winogrande,
    ),
    'boolq': Definition(
        yaml='super_glue/boolq/default.yaml',
        file='reading_comprehension/boolq.jsonl',
        documents_of=of_boolq,
    ),
    'arc_easy': Definition(yaml='arc/arc_easy.yaml', file='world_knowledge/arc_easy.jsonl', documents_of=of_arc),
    'hellaswag': Definition(
        yaml='hellaswag/hellaswag.yaml',
        file='language_understanding/hellaswag.jsonl',
        documents_of=of_hellaswag,
    ),
    'mmlu_nutrition': Definition(
        yaml='mmlu/default/mmlu_nutrition.yaml',
        file='world_knowledge/mmlu.jsonl',
        documents_of=of_mmlu,
    ),
    'lambada_openai': Definition(
        yaml='lambada/lambada_openai.yaml',
        file='language_understanding/lambada_openai.jsonl',
        documents_of=of_lambada,
    ),
    'wikitext': Definition(
        yaml='wikitext/wikitext.yaml',
        file='reading_comprehension/boolq.jsonl',
        documents_of=of_wikitext,
        rows_per_document=PASSAGES_PER_PAGE,
    ),
    'gsm8k': Definition(
        yaml='gsm8k/gsm8k.yaml',
        file='symbolic_problem_solving/gsm8k.jsonl',
        documents_of=of_gsm8k,
    ),
}


def write_task(label: str, data_root: Path, folder: Path, num_documents: int, keys: dict[str, Any]) -> str:
    """Write the YAML and the data files of a task with further keys of its own; return its name.

    The documents are spread evenly over our file; the rows to draw shots from are others, if it has enough.
    """
    definition = DEFINITIONS[label]
    lines = (data_root / definition.file).read_text('utf-8').splitlines()
    num_evaluated = num_documents * definition.rows_per_document
    num_wanted = num_evaluated + (SHOT_ROWS if keys['num_fewshot'] else 0)
    step = max(1, len(lines) // num_wanted)
    rows = [json.loads(line) for line in lines[::step]]
    evaluated = rows[:num_evaluated]
    for_shots = rows[num_evaluated:num_wanted]
    if len(for_shots) < keys['num_fewshot']:
        for_shots = rows

    name = f'bench_{label}_{keys["num_fewshot"]}_shots'
    if keys.get('fewshot_config') == FIXED:
        name = f'{name}_fixed'
    folder = folder / name
    folder.mkdir(parents=True, exist_ok=True)
    files = {}
    for split, rows_of_split in (('test', evaluated), ('shots', for_shots)):
        documents = definition.documents_of(rows_of_split)
        text = ''.join(f'{json.dumps(document)}\n' for document in documents)
        path = folder / f'{split}.jsonl'
        path.write_text(text, 'utf-8')
        # The splits of a data set must all have rows.
        if text:
            files[split] = str(path.resolve())

    (package,) = find_spec('lm_eval').submodule_search_locations
    definitions = Path(package) / 'tasks'
    content = {
        'include': str(definitions / definition.yaml),
        'task': name,
        'dataset_path': 'json',
        'dataset_name': None,
        'dataset_kwargs': {'data_files': files},
        'training_split': None,
        'validation_split': None,
        'test_split': 'test',
        'fewshot_split': 'shots' if keys['num_fewshot'] else None,
        **keys,
    }
    (folder / f'{name}.yaml').write_text(json.dumps(content, indent=1), 'utf-8')  # JSON is YAML too
    return name
