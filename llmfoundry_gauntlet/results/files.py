"""`results.json` and `samples/` of one evaluation, written atomically and read back."""

from __future__ import annotations

import contextlib
import errno
import json
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from datetime import UTC, datetime, timedelta
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import fmean
from typing import Any

from llmfoundry_gauntlet.config.resources import path_problem
from llmfoundry_gauntlet.data.examples import SUBSET_VERSION
from llmfoundry_gauntlet.data.stores import UNFINISHED, sync_folder, unfinished_path, write_atomically, write_synced
from llmfoundry_gauntlet.errors import ConfigError, RecordError, UnwrittenError, as_given, describe, naming
from llmfoundry_gauntlet.evaluation.run import Evaluation, gauntlet_version
from llmfoundry_gauntlet.metrics.consistency import OverPrompts, PerturbationScore
from llmfoundry_gauntlet.metrics.keys import GOLD_BITS
from llmfoundry_gauntlet.metrics.metrics import RENAMED
from llmfoundry_gauntlet.metrics.statistics import interval, variance_shares
from llmfoundry_gauntlet.results.samples import SAMPLES, sample_lines, samples_file
from llmfoundry_gauntlet.results.token_limits import token_limit_record
from llmfoundry_gauntlet.stack import VERSION
from llmfoundry_gauntlet.tasks.base import FIXED_VERSION
from llmfoundry_gauntlet.tasks.encode import texts_without_tokenizer
from llmfoundry_gauntlet.types import ItemResult, Measure, TaskScore, TrainingPoint

FORMAT_VERSION = 1
RESULTS = 'results.json'
# Names in records of 0.1.0 to current ones.
CURRENT_NAMES = {
    **RENAMED,
    'num_truncated': 'num_shortened',
    'gauntlet/truncated_items': 'gauntlet/shortened_items',
}
# The packages whose versions are recorded if they are installed.
PACKAGES = ('torch', 'transformers', 'tokenizers', 'mosaicml', 'numpy', 'peft', 'llm-foundry')
GIT_SECONDS = 5.0
UNCHANGED = ('package_version', 'semantics', 'tasks', 'composites', 'score', 'config')  # equal in a rerun
NEW_RESULTS, OLD_SAMPLES = 'results', 'old_samples'  # temporary names while a run replaces another


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Write text lines atomically. Raise RecordError."""
    try:
        write_atomically(path, encoded(lines))
    except OSError as error:
        raise RecordError(f'{path}: cannot be written: {error.strerror or error}') from error


def encoded(lines: Iterable[str]) -> Iterator[bytes]:
    """Yield text lines as UTF-8; surrogates become JSON escapes."""
    return (f'{line}\n'.encode('utf-8', 'backslashreplace') for line in lines)


def check_writable(folder: Path) -> None:
    """Raise RecordError if a folder cannot be created or written to."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise RecordError(
            f'{folder}: nothing can be written there ({error.strerror or error}); give another folder, or the right '
            'to write into this one'
        ) from error


def write_records(
    folder: Path,
    evaluation: Evaluation,
    *,
    model: Mapping[str, Any],
    environment: Mapping[str, Any],
    training: TrainingPoint | None,
    identity: Mapping[str, Any] | None = None,
    reused_items: int = 0,
    started: float | None = None,
    earlier_seconds: float = 0.0,
    time_budget: Mapping[str, int] | None = None,
) -> None:
    """Write samples and results.json, replacing an earlier evaluation as `replace_run` does. Raise UnwrittenError.

    Another evaluation may reuse the items only if its `identity` is equal; `reused_items` is the number of items reused
    in this one. `started` (Unix time) is when its first attempt did, `earlier_seconds` the time of attempts before the
    last. `time_budget` is the number of questions per task that fit into the time budget, if there is one.
    """
    record = results_record(evaluation)
    record.update(model=dict(model), environment={**environment, **machine()}, training=training and asdict(training))
    record['identity'] = identity and dict(identity)
    record['timing'].update(reused_items=reused_items, time_budget=time_budget and dict(time_budget))
    seconds = record['timing']['seconds']
    now = datetime.now(UTC)
    first_start = now - timedelta(seconds=seconds) if started is None else datetime.fromtimestamp(started, UTC)
    record['timing'].update(
        seconds=seconds + earlier_seconds,
        started=first_start.isoformat(timespec='seconds'),
        finished=now.isoformat(timespec='seconds'),
    )
    replace_run(folder, evaluation, record)


def is_recorded(folder: Path, evaluation: Evaluation) -> bool:
    """Return whether a folder's results.json has these scores and settings. Raise RecordError if it is unreadable."""
    if not (folder / RESULTS).is_file():
        return False
    recorded = read_results(folder)
    record = json.loads(json_text(results_record(evaluation)))
    return all(recorded[name] == record[name] for name in UNCHANGED)


def machine() -> dict[str, Any]:
    """Return the host, library versions, and the git commit of the working directory (None outside a repository)."""
    commit = None
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = ['git', 'rev-parse', 'HEAD']
        process = subprocess.run(command, capture_output=True, text=True, timeout=GIT_SECONDS, check=True)
        commit = process.stdout.strip()
    versions = {}
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version(package)
    return {'host': platform.node(), 'git_commit': commit, 'packages': versions}


def write_again(folder: Path, evaluation: Evaluation, earlier: Mapping[str, Any]) -> None:
    """Write metrics recomputed from an earlier evaluation's items, keeping its record of the model and the run."""
    record = results_record(evaluation)
    kept_names = ('model', 'environment', 'training', 'timing', 'config', 'identity')
    record.update((name, earlier[name]) for name in kept_names)
    record['alerts'] = earlier.get('alerts')  # which earlier versions did not record
    replace_run(folder, evaluation, record)


def replace_run(folder: Path, evaluation: Evaluation, record: Mapping[str, Any]) -> None:
    """Write a run, replacing an earlier one. Raise UnwrittenError.

    If interrupted at any point, the folder contains the complete old run, the complete new one, or no results.json and
    thus no run. The new run is first written to a hidden folder and synced to disk; then files are only renamed.
    """
    new = unfinished_path(folder)
    try:
        write_run(new, evaluation, record)
    except OSError as error:
        raise unwritten(f'{folder}: cannot be written', error, folder, record) from error

    # A folder without results.json holds no run, so that file goes first and comes last.
    try:
        (folder / RESULTS).unlink(missing_ok=True)
        sync_folder(folder)
        if (folder / SAMPLES).exists():
            (folder / SAMPLES).rename(new / OLD_SAMPLES)
        (new / SAMPLES).rename(folder / SAMPLES)
        sync_folder(folder)
        (new / NEW_RESULTS).rename(folder / RESULTS)
        sync_folder(folder)
    except OSError as error:
        raise unwritten(f'{folder}: the run in {new} cannot be moved here', error, folder, record) from error

    # Of this writer, and of writers that were killed.
    for leftover in folder.glob(f'.*{UNFINISHED}'):
        shutil.rmtree(leftover, ignore_errors=True)
        with contextlib.suppress(OSError):  # the leftover may be a file
            leftover.unlink(missing_ok=True)


def unwritten(problem: str, error: OSError, folder: Path, record: Mapping[str, Any]) -> UnwrittenError:
    """Return the error for a run that could not be written, with its scores and the first step of the remedy."""
    remedy = 'free space there' if error.errno in (errno.ENOSPC, errno.EDQUOT) else 'make the folder writable'
    # As it would be read back: with lists in place of tuples.
    record_as_read: dict[str, Any] = json.loads(json_text(record))
    return UnwrittenError(f'{problem}: {error.strerror or error}; {remedy}', folder=folder, record=record_as_read)


def write_run(folder: Path, evaluation: Evaluation, record: Mapping[str, Any]) -> None:
    """Write a run into a new folder and sync it to disk. Raise OSError after removing the folder."""
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        (folder / SAMPLES).mkdir(parents=True)
        examples = evaluation.data.examples if evaluation.data.settings.log_prompts else {}
        texts_of = texts_without_tokenizer if evaluation.planned is None else evaluation.planned.texts_of
        for key, results in evaluation.results.items():
            lines = sample_lines(evaluation.tasks[key], results, examples.get(key), texts_of)
            write_synced(samples_file(folder, key), encoded(lines))
        write_synced(folder / NEW_RESULTS, encoded([json_text(record)]))
        sync_folder(folder / SAMPLES)
        sync_folder(folder)
        stack.pop_all()


def check_out(out: Path, *, overwrite: bool, resume: bool = False) -> None:
    """Raise RecordError if `out` cannot be an output folder or contains results that would be lost."""
    if overwrite and resume:
        raise ConfigError(f'{as_given("resume")} and {as_given("overwrite")} exclude each other; give one of them')
    with naming('out'):
        check_folder(out, is_for_new=not overwrite and not resume)


def check_folder(out: Path, *, is_for_new: bool) -> None:
    """Raise RecordError if `out` cannot be an output folder, or if it is to be new and holds anything."""
    if not out.is_absolute() and re.fullmatch(r'\w{2,}:', next(iter(out.parts), '')):
        uri = str(out).replace(':/', '://', 1)  # of which a path has lost a slash
        raise RecordError(f'{uri}: is not on this machine; allowed: a local folder, which can be uploaded later')
    if problem := path_problem(str(out)):
        raise RecordError(f'{out}: {problem}')
    if out.exists() and not out.is_dir():
        raise RecordError(f'{out}: is a file; give a folder')
    if is_for_new and out.is_dir() and any(out.iterdir()):
        raise RecordError(
            f'{out}: is not empty; give another folder, {as_given("resume")} to resume an interrupted evaluation, or '
            f'{as_given("overwrite")} to replace the content'
        )


def json_text(content: Any) -> str:
    """Return indented JSON. Raise ValueError, an internal error, for a number that is not finite."""
    return json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False)


def results_record(evaluation: Evaluation) -> dict[str, Any]:
    """Return the part of results.json that depends only on the evaluation."""
    tasks = {
        key: score_record(score) | task_record(evaluation, key)
        for key, score in evaluation.scores.items()
        if not evaluation.tasks[key].asks_variants
    }
    tasks.update({key: {'reason': reason} for key, reason in evaluation.data.unsupported.items()})
    return {
        'format_version': FORMAT_VERSION,
        'package_version': VERSION,
        'semantics': evaluation.data.settings.semantics,
        'model': None,
        'training': None,
        'tasks': tasks,
        'composites': composites_record(evaluation),
        'score': robustness_record(evaluation),
        'alerts': None if evaluation.alerts is None else [asdict(alert) for alert in evaluation.alerts],
        'metrics': evaluation.metrics,
        'timing': timing_record(evaluation),
        'environment': None,
        'config': config_record(evaluation),
    }


def composites_record(evaluation: Evaluation) -> dict[str, Any] | None:
    """Return the composites, their definition, and a digest; composites are comparable only if digests agree."""
    composites, gauntlet = evaluation.composites, evaluation.data.suite.gauntlet
    if composites is None or gauntlet is None:
        return None
    return {
        'version': gauntlet_version(evaluation.data, gauntlet),
        'categories': {name: composite_record(measure) for name, measure in composites.categories.items()},
        'averages': {name: composite_record(measure) for name, measure in composites.averages.items()},
        GOLD_BITS: {name: composite_record(measure) for name, measure in composites.gold_bits.items()},
        'gauntlet': asdict(gauntlet),
    }


def composite_record(measure: Measure) -> dict[str, Any]:
    """Return a category score or an average, with each task's share of its variance."""
    record = measure_record(measure)
    shares = variance_shares(measure)
    return {**record, 'variance_shares': shares} if shares else record


def timing_record(evaluation: Evaluation) -> dict[str, Any]:
    """Return the evaluation's seconds and, if a model was run, its tokens, batches and layouts."""
    record: dict[str, Any] = {'seconds': sum(evaluation.seconds.values()), 'tasks': dict(evaluation.seconds)}
    planned = evaluation.planned
    if planned is not None:
        record.update(
            model_tokens=planned.num_model_tokens,
            batches=len(planned.batches),
            scoring=planned.scoring or None,
            generation=planned.generation or None,
        )
    return record


def config_record(evaluation: Evaluation) -> dict[str, Any]:
    """Return the settings, with automatic ones resolved to their values."""
    settings = asdict(evaluation.data.settings)
    if evaluation.planned is not None:
        settings.update(
            max_seq_len=evaluation.planned.max_seq_len,
            tokens_per_batch=evaluation.planned.tokens_per_batch,
            generation_tokens_per_batch=evaluation.planned.generation_tokens_per_batch,
            requests_per_batch=evaluation.planned.requests_per_batch,
            tokenizer=evaluation.planned.tokenizer,
        )
    if evaluation.data.sandbox is not None:
        settings['sandbox'] = str(evaluation.data.sandbox)
    if evaluation.data.settings.fewshot == 'fixed':
        settings['fewshot_version'] = FIXED_VERSION
    if evaluation.data.subset_sizes:
        settings['subset_version'] = SUBSET_VERSION
    return settings


def task_record(evaluation: Evaluation, key: str) -> dict[str, Any]:
    """Return the definition of the task with this key."""
    task = evaluation.tasks[key]
    return {
        'icl_task_type': task.icl_task_type,
        'dataset_uri': task.dataset_uri,
        'data_sha256': evaluation.data.digests.get(key),
        'data_origin': evaluation.data.origins.get(key),
        'chance': task.chance(evaluation.results[key]),
        'effective_shots': effective_shots(evaluation.results[key]),
        'ended_at_limit': token_limit_record(task, evaluation.results[key]),
        'subset_items': evaluation.data.subset_sizes.get(key),
        'num_rows': evaluation.data.num_rows.get(key),
        'spec': task.definition,
    }


def effective_shots(results: Sequence[ItemResult]) -> float | None:
    """Return the mean number of shots per prompt after truncation; None for records without this number."""
    num_shots = [result.num_shots for result in results if result.num_shots is not None]
    return fmean(num_shots) if num_shots else None


def score_record(score: TaskScore) -> dict[str, Any]:
    """Return a task's metrics and counts, overall and by category."""
    record: dict[str, Any] = {
        'metrics': {name: measure_record(measure) for name, measure in score.metrics.items()},
        'num_items': score.num_items,
        'num_unscored': score.num_unscored,
        'num_shortened': score.num_shortened,
    }
    if score.categories:
        record['categories'] = {name: score_record(part) for name, part in score.categories.items()}
    return record


def robustness_record(evaluation: Evaluation) -> dict[str, Any] | None:
    """Return SCORE's datasets with their absent files and each perturbation, or the reason why it does not apply."""
    record: dict[str, Any] = {}
    for key, task in evaluation.tasks.items():
        if not task.asks_variants:
            continue
        results = evaluation.results[key]
        perturbations = {
            name: perturbation_record(score) for name, score in evaluation.robustness[task.dataset_name].items()
        }
        perturbations |= {name: {'reason': reason} for name, reason in task.perturbations_left_out.items()}
        counts = score_record(evaluation.scores[key])
        del counts['metrics']
        record[task.dataset_name] = {
            'task': key,
            **counts,
            'ended_at_limit': token_limit_record(task, results),
            'chance': task.chance(results),
            'absent_files': list(evaluation.data.absent.get(key, ())),
            'perturbations': perturbations,
            'data_sha256': evaluation.data.digests.get(key),
            'data_origin': evaluation.data.origins.get(key),
            'spec': task.definition,
        }
    return record or None


def perturbation_record(score: PerturbationScore) -> dict[str, Any]:
    """Return all measures of a perturbation, overall, by variant and by gold label."""
    record: dict[str, Any] = {}
    for field in fields(score):
        value = getattr(score, field.name)
        if isinstance(value, Measure):
            record[field.name] = measure_record(value)
        elif isinstance(value, Mapping):
            record[field.name] = {name: measure_record(measure) for name, measure in value.items()}
        elif isinstance(value, OverPrompts):
            record['accuracy_over_prompts'] = measure_record(value.accuracy)
            record['consistency_rate_over_prompts'] = measure_record(value.consistency_rate)
            record['prompt_deviation'] = measure_record(value.prompt_deviation)
        elif value is not None:
            record[field.name] = value
    return record


def measure_record(measure: Measure) -> dict[str, Any]:
    """Return a measure for results.json: its value, standard error and 95 % interval, or why it has no value.

    `single_clusters` names tasks and categories with only one cluster, whose part of the error is approximated
    (`is_borrowed` in metrics/statistics.py).
    """
    if measure.value is None:
        return {'reason': measure.reason}
    if measure.spread is None:
        return {'value': measure.value} | ({'no_error': measure.no_error} if measure.no_error else {})
    record: dict[str, Any] = {
        'value': measure.value,
        'standard_error': measure.standard_error,
        'confidence_interval': interval(measure),
        'degrees_of_freedom': measure.spread.freedom,
    }
    if borrowed := [stratum.name for stratum in measure.spread.strata if stratum.is_borrowed]:
        record['single_clusters'] = borrowed
    return record


def read_results(folder: Path) -> dict[str, Any]:
    """Return the content of a folder's results.json. Raise RecordError."""
    path = folder / RESULTS
    try:
        record = json.loads(path.read_text(encoding='utf-8'))
    except (OSError, json.JSONDecodeError) as error:
        raise RecordError(f'{path}: cannot be read: {error}') from error
    if not isinstance(record, dict) or record.get('format_version') != FORMAT_VERSION:
        raise RecordError(f'{path}: is not a results file of format {FORMAT_VERSION}')
    training = record.get('training')
    if 'training' not in record or not isinstance(training, dict | None):
        raise RecordError(f'{path}: training: is {describe(training)}; it cannot be used, evaluate again')
    if training is not None and type(training.get('batch')) is not int:
        raise RecordError(
            f'{path}: training.batch: is {describe(training.get("batch"))}; it cannot be used, evaluate again'
        )
    return with_current_names(record)


def with_current_names(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record, or part of one, with former names of metrics and counts replaced by current ones."""
    return {
        CURRENT_NAMES.get(name, name): with_current_names(value) if isinstance(value, dict) else value
        for name, value in record.items()
    }


def average_size(record: Mapping[str, Any]) -> int | None:
    """Return how many checkpoints a record is the average of; None if it is of a single one."""
    others = (record.get('model') or {}).get('averaged_with')
    return len(others) + 1 if others else None


def results_of_checkpoints(run: Path) -> list[tuple[Path, dict[str, Any]]]:
    """Return what `find_results` does without averages of checkpoints, unless there is nothing else."""
    results = find_results(run)
    single = [(folder, record) for folder, record in results if average_size(record) is None]
    return single or results


def find_results(run: Path) -> list[tuple[Path, dict[str, Any]]]:
    """Return every results.json at or below `run`, ordered by training batch, then by path."""
    paths = sorted(run.rglob(RESULTS))
    if not paths:
        raise RecordError(f'{run}: there is no {RESULTS} at or below it')
    records = [(path.parent, read_results(path.parent)) for path in paths]

    def order(folder_and_record: tuple[Path, dict[str, Any]]) -> tuple[int, str]:
        folder, record = folder_and_record
        training = record['training'] or {}
        return training.get('batch', -1), str(folder)

    return sorted(records, key=order)
