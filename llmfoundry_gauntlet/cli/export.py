"""`gauntlet export`: the requests of tasks, for a model elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from llmfoundry_gauntlet.cli.options import DataRoot, Fewshot, Limit, Score, Semantics, Tasks
from llmfoundry_gauntlet.errors import ConfigError, RecordError


def export(
    out: Annotated[Path, typer.Option('--out', help='File for the requests, a JSON line each.')],
    tasks: Tasks = None,
    score: Score = None,
    data_root: DataRoot = 'eval_data',
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help='Folder or name: counts max_new_tokens, which is an estimate without it; has a chat template.'
        ),
    ] = None,
    semantics: Semantics = 'corrected',
    fewshot: Fewshot = 'reference',
    limit: Limit = None,
    overwrite: Annotated[bool, typer.Option('--overwrite', help='Replace the file.')] = False,
) -> None:
    """Writes the requests of all tasks for a server or an API; `gauntlet run --outputs` marks what it answers.

    gauntlet export --tasks yamls/tasks/gauntlet_v0.1.yaml --out requests.jsonl
    """
    from llmfoundry_gauntlet.config.settings import decode_settings
    from llmfoundry_gauntlet.evaluation.inputs import load_data
    from llmfoundry_gauntlet.results.requests import request_lines
    from llmfoundry_gauntlet.results.writing import write_lines

    if out.is_dir() or (out.exists() and not overwrite):
        raise RecordError(f'{out}: is there already; give another file, or --overwrite to replace it')
    if tasks is None and score is None:
        raise ConfigError('nothing to export: give --tasks, --score or both')
    settings = {
        'tasks': tasks,
        'score': score,
        'data_root': data_root,
        'semantics': semantics,
        'fewshot': fewshot,
        'subset_items': limit,
    }
    data = load_data(decode_settings(settings, 'export'))
    for warning in data.warnings:
        typer.echo(f'warning: {warning}')
    encoder = None
    if tokenizer is not None:
        from llmfoundry_gauntlet.composer.pretrained import load_tokenizer
        from llmfoundry_gauntlet.tasks.encode import Encoder

        encoder = Encoder(load_tokenizer(tokenizer))
    write_lines(out, request_lines(data, encoder))
    typer.echo(f'{out}: requests of {len(data.examples)} tasks')
