"""lm-eval's own task definitions with rows of ours, and the model whose answers to them are compared."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import lm_eval
import yaml
from paths import FIXTURES, ROOT
from tokenizers import processors
from transformers import AutoTokenizer

DEFINITIONS = ROOT / 'tests' / 'lm_eval_tasks'
LM_EVAL_TASKS = Path(lm_eval.__file__).parent / 'tasks'
MODEL = FIXTURES / 'models' / 'sums'

Rows = Mapping[str, list[dict[str, Any]]]  # by split


class FunctionTag(str):
    """The name of a Python function or class in a task definition."""


class DefinitionLoader(yaml.SafeLoader):
    """Read a definition without importing its functions."""


class DefinitionDumper(yaml.SafeDumper):
    """Write a definition with its functions' names."""


DefinitionLoader.add_constructor('!function', lambda loader, node: FunctionTag(loader.construct_scalar(node)))
DefinitionDumper.add_representer(FunctionTag, lambda dumper, name: dumper.represent_scalar('!function', name))


# Definitions


def read_definition(name: str) -> tuple[dict[str, Any], Rows | None]:
    """Return a definition and its rows, or those of the definition that it names; groups have none."""
    definition: dict[str, Any] = yaml.load((DEFINITIONS / f'{name}.yaml').read_text('utf-8'), DefinitionLoader)
    rows = definition.pop('rows', None)
    if isinstance(rows, str):
        _, rows = read_definition(rows)
    return definition, rows


def write_definitions(folder: Path, rows_of_task: Mapping[str, Rows] | None = None) -> Path:
    """Write the definitions of tests/lm_eval_tasks for lm-eval; with `rows_of_task` those of these tasks alone."""
    names = sorted(path.stem for path in DEFINITIONS.glob('*.yaml')) if rows_of_task is None else [*rows_of_task]
    for name in names:
        definition, rows = read_definition(name)
        if rows_of_task is not None:
            rows = rows_of_task[name]
        include = definition.get('include')
        if include is not None and not (DEFINITIONS / include).exists():
            definition['include'] = str(LM_EVAL_TASKS / include)
        if rows is not None:
            data_files = write_rows(folder / name, rows)
            if 'class' not in definition:
                definition |= {
                    'dataset_path': 'json',
                    'dataset_name': None,
                    'dataset_kwargs': {'data_files': data_files},
                }
        text = yaml.dump(definition, Dumper=DefinitionDumper, sort_keys=False)
        (folder / f'{name}.yaml').write_text(text, encoding='utf-8')
    for path in DEFINITIONS.glob('*.py'):
        shutil.copy(path, folder)
    return folder


def write_rows(folder: Path, rows: Rows) -> dict[str, str]:
    """Write a file for each split; return their paths."""
    folder.mkdir(parents=True)
    data_files = {}
    for split, rows_of_split in rows.items():
        path = folder / f'{split}.jsonl'
        path.write_text(''.join(f'{json.dumps(row)}\n' for row in rows_of_split), encoding='utf-8')
        data_files[split] = str(path)
    return data_files


# Real rows


def real_rows(data: Path, num_rows: int) -> dict[str, Rows]:
    """Return rows of the project's evaluation files, in the columns of lm-eval's data sets, with as many for shots."""

    def rows_of(name: str, column_names: Callable[[dict[str, Any]], dict[str, Any]]) -> list[dict[str, Any]]:
        with (data / f'{name}.jsonl').open(encoding='utf-8') as file:
            return [column_names(json.loads(line)) for line in islice(file, 2 * num_rows)]

    def two_solutions(row: dict[str, Any]) -> dict[str, Any]:
        first, second = row['choices']
        return {'goal': row['query'].removeprefix('Question: '), 'sol1': first, 'sol2': second, 'label': row['gold']}

    def lettered(row: dict[str, Any]) -> dict[str, Any]:
        letters = ['A', 'B', 'C', 'D', 'E'][: len(row['choices'])]
        choices = {'text': row['choices'], 'label': letters}
        question = row['query'].removeprefix('Question: ')
        return {'question': question, 'choices': choices, 'answerKey': letters[row['gold']]}

    def last_word(row: dict[str, Any]) -> dict[str, Any]:
        return {'text': f'{row["context"]} {row["continuation"]}'}

    def worked_out(row: dict[str, Any]) -> dict[str, Any]:
        return {'question': row['context'], 'answer': f'{row["chain_of_thought"]}\n#### {row["answer"]}'}

    def with_aliases(row: dict[str, Any]) -> dict[str, Any]:
        question = row['context'].removeprefix('Question: ').removesuffix('\nAnswer:').removesuffix('?')
        return {'question': question, 'answer': {'aliases': row['aliases'], 'value': row['answer']}}

    piqa = rows_of('commonsense_reasoning/piqa', two_solutions)
    arc_easy = rows_of('world_knowledge/arc_easy', lettered)
    lambada = rows_of('language_understanding/lambada_openai', last_word)
    gsm8k = rows_of('symbolic_problem_solving/gsm8k', worked_out)
    triviaqa = rows_of('world_knowledge/triviaqa_sm_sub', with_aliases)
    pages = [{'page': row['text']} for row in lambada]
    return {
        'piqa': {'train': piqa[num_rows:], 'validation': piqa[:num_rows]},
        'arc_easy': {
            'train': arc_easy[num_rows:],
            'validation': arc_easy[num_rows:],
            'test': arc_easy[:num_rows],
        },
        'lambada_openai': {'test': lambada[:num_rows]},
        'gsm8k': {'train': gsm8k[num_rows:], 'test': gsm8k[:num_rows]},
        'triviaqa': {'train': triviaqa[num_rows:], 'validation': triviaqa[:num_rows]},
        'wikitext': {'train': pages[num_rows:], 'validation': pages[num_rows:], 'test': pages[:num_rows]},
    }


# Models


def save_with_begin(folder: Path) -> Path:
    """Save the model with a tokenizer that puts a beginning token before each text; return the folder."""
    shutil.copytree(MODEL, folder)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    begin = tokenizer.bos_token
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f'{begin} $A', special_tokens=[(begin, tokenizer.bos_token_id)]
    )
    tokenizer.save_pretrained(folder)
    return folder
