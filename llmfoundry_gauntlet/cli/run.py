"""`gauntlet run`: evaluate a model, score generations, or recompute an earlier run; also `export`, `train`, `eval`."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from llmfoundry_gauntlet.cli.options import (
    CHAT,
    GAUNTLET,
    GAUNTLET_TASKS,
    INPUTS,
    MODEL,
    RUNNING,
    SELECTION,
    OutputFormat,
    check_options,
    print_warnings,
    problems_of_file,
    settings_of,
    start_logging,
    takes,
)
from llmfoundry_gauntlet.errors import COMMAND_LINE, Collected, ConfigError, RecordError, UnwrittenError, naming, plural

File = Annotated[
    str, typer.Argument(metavar='FILE.yaml', help='YAML file; paths in it are relative to the working directory.')
]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar='KEY=VALUE', help='Values that override those in the file.')
]
OF_MODELS = (*MODEL, 'revision', 'adapter', *CHAT, *RUNNING, 'resume', 'repair_journal', 'loggers', 'log')
OF_MODELS_ALONE = (*OF_MODELS, 'dry_run')
EXCLUDES = {  # for each option, the options that have no effect with it
    'model': ('allow_missing',),
    'outputs': OF_MODELS_ALONE,
    'recorded': (*(name for name in INPUTS if name != 'gauntlet'), *OF_MODELS_ALONE),
    'dry_run': ('loggers', 'log', 'resume', 'repair_journal'),
}
NEEDS = {'repair_journal': ('resume',), 'log': ('loggers',)}


@takes(*INPUTS, *OF_MODELS)
def run(
    context: typer.Context,
    *,
    out: Path | None,
    model: str | None,
    outputs: Path | None,
    recorded: Path | None,
    allow_missing: bool,
    overwrite: bool,
    dry_run: bool,
    form: OutputFormat,
    **given: Any,
) -> None:
    r"""Evaluate a model, score generations from another engine, or recompute the metrics of an earlier run.

    Without --tasks and --score: the Gauntlet v0.1.

    Examples:
      # a first look: some tasks, 100 items of each
      gauntlet run --model MODEL --only hellaswag,copa,world_knowledge --subset-items 100 \
          --out runs/first_look
      # what all tasks would take, without running them
      gauntlet run --model MODEL --data-root data --dry-run
      # a checkpoint of Composer on all tasks, within ten minutes
      gauntlet run --model runs/demo/checkpoints/latest-rank0.pt --data-root data \
          --time-budget 10m --out runs/demo/eval
      # after an interruption: the same command with --resume
      gauntlet run --model runs/demo/checkpoints/latest-rank0.pt --data-root data \
          --time-budget 10m --out runs/demo/eval --resume
      # SCORE
      gauntlet run --model MODEL --score yamls/score/mmlu_pro.yaml --out runs/mmlu_pro
      # generations of another engine, for the requests of gauntlet export
      gauntlet run --outputs generations.jsonl --score yamls/score/math.yaml --out runs/math
      # the metrics of an earlier run again, with this version
      gauntlet run --from runs/mmlu_pro --out runs/mmlu_pro_again
      # a model that needs several GPUs
      torchrun --nproc-per-node 8 -m llmfoundry_gauntlet run --model MODEL --fsdp-config {} \
          --data-root data --out runs/sharded
    """
    from llmfoundry_gauntlet.results.interrupts import exit_on_signals, nothing_written
    from llmfoundry_gauntlet.results.report.printing import print_scores, print_unwritten
    from llmfoundry_gauntlet.results.runs import find_evaluations

    start_logging()
    is_first_rank = os.environ.get('RANK', '0') == '0'  # the ranks of a launcher have the same scores
    problems = []
    sources = {'--model': model, '--outputs': outputs, '--from': recorded}
    given_sources = [option for option, value in sources.items() if value is not None]
    if len(given_sources) != 1:
        found = ' and '.join(given_sources) if given_sources else 'none of them'
        problems.append(
            f'give one of --model, --outputs and --from (a model, generations, an earlier run); found {found}'
        )
    if out is None and not dry_run:
        problems.append('--out: is missing; give the folder for results.json and samples/')
    collected = Collected()
    with collected:
        check_options(context, needs=NEEDS, excludes=EXCLUDES, problems=problems)
    settings = inputs_of(given)
    if model is not None:
        settings.update(out=out, overwrite=overwrite)
        with collected:
            settings.update(settings_of(given, OF_MODELS))
        with collected:
            check_evaluation(model, settings)
    if collected.errors and recorded is None:  # else the files are checked where they are read
        with collected:
            check_files(settings)
    collected.raise_all()
    try:
        if recorded is not None and out is not None:
            with exit_on_signals(nothing_written):
                recompute(recorded, out, given['gauntlet'], allow_missing=allow_missing, overwrite=overwrite)
        elif outputs is not None and out is not None:
            with exit_on_signals(nothing_written):
                score_outputs(outputs, out, settings, form, allow_missing=allow_missing, overwrite=overwrite)
        elif model is not None:
            run_model(model, settings, form, dry_run=dry_run)
    except UnwrittenError as error:
        if is_first_rank:
            print_unwritten(error, form)
        if model is None:
            raise RecordError([f'{problem}, then run the same command again' for problem in error.problems]) from error
        raise
    if out is not None and not dry_run and is_first_rank:
        print_scores(find_evaluations([out]), form)


def inputs_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that select the items to run; default to the Gauntlet v0.1 without --tasks and --score."""
    settings = settings_of(given, INPUTS)
    if settings['tasks'] is None and settings['score'] is None:
        settings['tasks'] = GAUNTLET_TASKS
        settings['gauntlet'] = settings['gauntlet'] or GAUNTLET
    return settings


def check_evaluation(model: str, settings: Mapping[str, Any]) -> None:
    """Check the model and the settings, before data is read and torch imported. Raise GauntletError."""
    from llmfoundry_gauntlet.results.interrupts import exit_on_signals, nothing_written

    collected = Collected()
    with collected, exit_on_signals(nothing_written):
        check_model(model, settings)
    with collected:
        check_settings(model, settings)
    collected.raise_all()


def check_model(model: str, settings: Mapping[str, Any]) -> None:
    """Raise ModelError for a model, tokenizer, configuration or adapter that cannot be found."""
    from llmfoundry_gauntlet.data.hub import find_model
    from llmfoundry_gauntlet.data.stores import scheme_of

    collected = Collected()
    if not scheme_of(model):
        with collected, naming('model'):
            find_model(model, revision=settings.get('revision'))
    with collected:
        check_parts(settings)
    collected.raise_all()


def check_parts(settings: Mapping[str, Any]) -> None:
    """Raise ModelError for a tokenizer, configuration or adapter that cannot be found.

    They are loaded with a model, when tasks and data have been read, and by `gauntlet watch` with each checkpoint.
    """
    from llmfoundry_gauntlet.data.hub import find_model_folder
    from llmfoundry_gauntlet.data.stores import scheme_of

    collected = Collected()
    for name in ('tokenizer', 'model_config', 'adapter'):
        if settings.get(name) and not (name == 'adapter' and scheme_of(settings[name])):
            with collected, naming(name):
                find_model_folder(settings[name])
    collected.raise_all()


def check_settings(model: str, settings: Mapping[str, Any]) -> None:
    """Check the settings of an evaluation of a model, without torch and without the files that they name.

    Raise ConfigError with every problem found.
    """
    from llmfoundry_gauntlet.config.run import OF_RUN, decode_run
    from llmfoundry_gauntlet.config.settings import decode_settings

    collected = Collected()
    # Options without effect are reported already.
    repair_journal = settings.get('repair_journal') and settings.get('resume')
    values = {'model': model, **settings, 'repair_journal': bool(repair_journal)}
    _, problems = decode_run(values, COMMAND_LINE)
    if problems:
        collected.add(ConfigError(problems))
    with collected:
        decode_settings({key: value for key, value in settings.items() if key not in OF_RUN}, COMMAND_LINE)
    collected.raise_all()


def check_files(settings: Mapping[str, Any]) -> None:
    """Check tasks, data and the folder for records, for the other errors of a run that cannot start.

    Raise GauntletError with every problem found.
    """
    from llmfoundry_gauntlet.config.run import OF_RUN
    from llmfoundry_gauntlet.evaluation.inputs import load_inputs
    from llmfoundry_gauntlet.results.files import check_out

    collected = Collected()
    if settings.get('out') is not None:  # of a model
        with collected:
            check_out(settings['out'], overwrite=settings['overwrite'], resume=settings.get('resume', False))
    with collected:
        load_inputs({key: value for key, value in settings.items() if key not in OF_RUN}, COMMAND_LINE)
    collected.raise_all()


def run_model(model: str, settings: dict[str, Any], form: OutputFormat, *, dry_run: bool) -> None:
    """Evaluate a model, or print an estimate of the cost. Raise GauntletError."""
    from llmfoundry_gauntlet.results.interrupts import Interrupted, exit_on_signals, nothing_written, with_remedy

    option = '--resume in place of --overwrite' if settings['overwrite'] else '--resume'
    kept = Interrupted(folder=settings['out'], option=None if settings['resume'] else option)
    explain: Callable[[], str] = nothing_written if dry_run else kept
    with exit_on_signals(explain):
        if not dry_run:
            from llmfoundry_gauntlet.runtime.evaluate import evaluate

            try:
                evaluate(model, **settings)
            except UnwrittenError as error:
                raise with_remedy(error, kept) from error
            return
        from llmfoundry_gauntlet.results.report.printing import print_estimate
        from llmfoundry_gauntlet.runtime.dry_run import estimate

        print_estimate(estimate(model, **settings), form)


def score_outputs(
    outputs: Path, out: Path, settings: dict[str, Any], form: OutputFormat, *, allow_missing: bool, overwrite: bool
) -> None:
    """Score the generations in a file and write the records. Raise GauntletError."""
    from llmfoundry_gauntlet.evaluation.inputs import load_inputs
    from llmfoundry_gauntlet.results.external import read_answers, score_answers
    from llmfoundry_gauntlet.results.files import check_out, write_records

    collected = Collected()
    with collected:
        check_out(out, overwrite=overwrite)
    with collected:
        data = load_inputs({**settings, 'save_folder': str(out)}, COMMAND_LINE)
    with collected:
        answers = read_answers(outputs)
    collected.raise_all()
    print_warnings(data.warnings, err=form in (OutputFormat.CSV, OutputFormat.JSON))
    evaluation = score_answers(data, answers, allow_missing=allow_missing)
    model = {'name': str(outputs), 'class': None, 'num_parameters': None}
    write_records(out, evaluation, model=model, environment={'python': platform.python_version()}, training=None)


def recompute(recorded: Path, out: Path, gauntlet: Path | None, *, allow_missing: bool, overwrite: bool) -> None:
    """Recompute all metrics of an earlier run and write the records. Raise GauntletError."""
    from llmfoundry_gauntlet.evaluation.suite import load_suite
    from llmfoundry_gauntlet.results.files import RESULTS, check_out, write_again
    from llmfoundry_gauntlet.results.runs import read_run, summarize_again

    if not (recorded / RESULTS).is_file():
        raise RecordError(f'--from: {recorded} has no {RESULTS}; give the folder of an earlier run, its --out')
    if recorded.resolve() == out.resolve():
        raise ConfigError(f'--out: {out} is the earlier run itself (--from); give another folder')
    collected = Collected()
    with collected:
        check_out(out, overwrite=overwrite)
    with collected:
        run = read_run(recorded)
    with collected:
        spec = load_suite(None, gauntlet).gauntlet
    collected.raise_all()
    write_again(out, summarize_again(run, spec, allow_missing=allow_missing), run.record)


@takes(*SELECTION, *CHAT)
def export(
    context: typer.Context,
    out: Annotated[
        Path,
        typer.Option(
            '--out', metavar='FILE', help='File for the requests, a JSON line each.', rich_help_panel='Output'
        ),
    ],
    tokenizer: Annotated[
        str | None,
        typer.Option(
            metavar='FOLDER',
            help='Folder or name: counts max_new_tokens, which is an estimate without it; has a chat template.',
            rich_help_panel='Model',
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option('--overwrite', help='Replace the file.', rich_help_panel='Output')] = False,
    **given: Any,
) -> None:
    """Write the requests of all tasks for a server or an API; `gauntlet run --outputs` scores its generations.

    Examples:
      gauntlet export --score yamls/score/math.yaml --data-root data --out requests.jsonl
      # the prompts of a chat model, as messages
      gauntlet export --only gsm8k --tokenizer MODEL --apply-chat-template --out requests.jsonl
    """
    from llmfoundry_gauntlet.evaluation.inputs import load_inputs
    from llmfoundry_gauntlet.results.external import request_lines
    from llmfoundry_gauntlet.results.files import write_lines

    check_options(
        context,
        needs={'gauntlet': ('precision_target', 'only')},
        problems=problems_of_file(out, overwrite=overwrite),
    )
    settings = {**inputs_of(given), **settings_of(given, CHAT)}
    data = load_inputs(settings, COMMAND_LINE)
    encoder = None
    if tokenizer is not None:
        from llmfoundry_gauntlet.runtime.models import load_tokenizer
        from llmfoundry_gauntlet.tasks.encode import Encoder

        with naming('tokenizer'):
            encoder = Encoder(load_tokenizer(tokenizer))
    print_warnings(data.warnings)
    num_requests = 0

    def counted() -> Iterator[str]:  # of which a list would hold all prompts at once
        nonlocal num_requests
        for line in request_lines(data, encoder):
            num_requests += 1
            yield line

    write_lines(out, counted())
    typer.echo(f'{out}: {plural(num_requests, "request")} of {plural(len(data.examples), "task")}')
    typer.echo('gauntlet run --outputs FILE, with the same options for tasks, scores generations for them')


def eval_file(file: File, overrides: Overrides = None) -> None:
    """Evaluate one or several models from a YAML file: the options of gauntlet run as keys, or llm-foundry's keys.

    Exit status: 0 done, 1 some of several models failed, 2 the file is invalid or no model could be evaluated.

    Examples:
      gauntlet eval yamls/eval/demo.yaml
      # two processes, and another value of a key
      torchrun --nproc-per-node 2 -m llmfoundry_gauntlet eval yamls/eval/demo.yaml resume=true
    """
    from llmfoundry_gauntlet.results.interrupts import exit_on_signals, nothing_written

    without_value = [word for word in overrides or () if '=' not in word]
    if without_value:
        raise ConfigError([f'{word}: has no value; allowed: KEY=VALUE, such as resume=true' for word in without_value])
    start_logging()
    with exit_on_signals(nothing_written):
        from llmfoundry_gauntlet.runtime.evaluate_file import evaluate_file

    raise typer.Exit(evaluate_file(file, overrides or []))
