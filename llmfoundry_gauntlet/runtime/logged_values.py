"""Log each evaluation to W&B, MLflow and TensorBoard once, at its step, whoever opened the run."""

from __future__ import annotations

import fnmatch
import functools
import logging
import math
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from packaging.requirements import Requirement

from llmfoundry_gauntlet.errors import Caught, plural
from llmfoundry_gauntlet.metrics.keys import BATCH, COMPOSITE_PREFIX, GOLD_BITS, SCORE_PREFIX, SECONDS

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from torch.utils.tensorboard import SummaryWriter

EndRun = Callable[['MlflowClient', str], None]

log = logging.getLogger(__name__)

PACKAGE = 'llmfoundry-gauntlet'
LIBRARIES = (  # of the loggers, directly or to contact servers
    # Loggers.
    'wandb',
    'mlflow',
    'mlflow_skinny',
    'tensorboard',
    'comet_ml',
    'neptune',
    'slack_sdk',
    'databricks',
    # Libraries by which they contact servers.
    'requests',
    'urllib3',
    'httpx',
    'grpc',
    'google',
    'sqlalchemy',
    'alembic',
    'botocore',
)
MLFLOW_WAIT_SECONDS = 20.0  # longest wait for the server's answer before training continues
OURS = BATCH.partition('/')[0]

# Charts of TensorBoard's Custom Scalars; metric keys are regular expressions.
TENSORBOARD_CHARTS: dict[str, dict[str, list[Any]]] = {
    'gauntlet': {
        'composites': ['Multiline', [rf'^{COMPOSITE_PREFIX}/(?!.*/(standard_error|{GOLD_BITS})$).*$']],
        'gold bits per byte (lower is better)': ['Multiline', [rf'^{COMPOSITE_PREFIX}/.*/{GOLD_BITS}$']],
        'accuracy of tasks': ['Multiline', [r'^metrics/[^/]+/\d+-shot/InContextLearning[^/]*$']],
        'seconds': ['Multiline', [rf'^{SECONDS}$']],
    },
    'score': {
        'accuracy': ['Multiline', [rf'^{SCORE_PREFIX}/[^/]+/[^/]+/accuracy$']],
        'consistency rate': ['Multiline', [rf'^{SCORE_PREFIX}/[^/]+/[^/]+/consistency_rate$']],
    },
}


def logger_errors(logger: object) -> Caught:
    """Return a context manager that catches the exceptions of a logger and its libraries."""
    own = [kind.__module__.partition('.')[0] for kind in type(logger).__mro__]
    return Caught(packages=[*LIBRARIES, *(name for name in own if name != 'builtins')])


def warn_of_failure(logger: object, batch: int, error: BaseException) -> None:
    """Warn that a logger did not take the metrics of an evaluation."""
    log.warning(
        '%s failed to log the metrics of batch %d: %s: %s. Everything else continues',
        type(logger).__name__,
        batch,
        type(error).__name__,
        error,
    )


@functools.cache
def warn_of_library(extra: str) -> None:
    """Warn once per process if installed versions do not meet the requirements of this extra of the package."""
    wrong = []
    for wanted in map(Requirement, metadata.requires(PACKAGE) or ()):
        if wanted.marker is None or f'extra == "{extra}"' not in str(wanted.marker):
            continue
        try:
            version = metadata.version(wanted.name)
        except metadata.PackageNotFoundError:
            continue  # the logger itself says if it cannot do without
        if not wanted.specifier.contains(version, prereleases=True):
            wrong.append(f'{wanted.name} {version} is installed, {wanted.name}{wanted.specifier} is needed')
    if wrong:
        log.warning("loggers.%s: may fail: %s; pip install '%s[%s]'", extra, ', '.join(wrong), PACKAGE, extra)


def missing(logged: Mapping[tuple[str, int], float], values: Mapping[str, float], batch: int, logger: str) -> list[str]:
    """Return the keys whose value a logger does not hold yet at a step.

    A resumed training repeats the evaluations after its checkpoint. Metrics that differ from those already logged by
    more than rounding are logged too, with a warning; times and counts are not logged again.
    """
    new = [key for key in values if (key, batch) not in logged]
    repeated = [key for key in values if (key, batch) in logged and not key.startswith(f'{OURS}/')]
    changed = [key for key in repeated if not is_rounded(logged[key, batch], values[key])]
    if changed:
        log.warning(
            '%s holds other values of batch %d already, as of %s: %g, now %g; now it holds both',
            logger,
            batch,
            changed[0],
            logged[changed[0], batch],
            values[changed[0]],
        )
    return new + changed


def is_rounded(logged: float, value: float) -> bool:
    """Return whether a logged value is this one but for rounding."""
    return math.isclose(logged, value, rel_tol=1e-4, abs_tol=1e-6)


@dataclass(slots=True, eq=False)
class WandbRows:
    """The rows of evaluations in a W&B run, with the training batch as the x-axis of their charts."""

    has_axis: bool = False

    def log(self, run: Any, values: Mapping[str, float], step: int) -> None:
        """Add the values to the run's row of this step."""
        if not self.has_axis:
            run.define_metric(BATCH, hidden=True)
            for pattern in wandb_patterns(values):
                run.define_metric(pattern, step_metric=BATCH)
            self.has_axis = True
        run.log(dict(values), step=step)


def late_row(run: Any, batch: int) -> int:
    """Return the step of a new row for an evaluation; W&B drops rows whose step is lower than its current one."""
    return max(batch, int(run.step) + 1)


def wandb_patterns(keys: Iterable[str]) -> list[str]:
    """Return patterns for `define_metric` that cover these keys; W&B allows a star only at the end.

    Not `metrics/*`, because Composer's own evaluators and training metrics have such keys too.
    """
    matches = (re.match(r'(?:metrics/.+?/\d+-shot|average_\d+)/', key) for key in keys)
    prefixes_of_tasks = [match.group() for match in matches if match is not None]
    prefixes = [f'{OURS}/', f'{COMPOSITE_PREFIX}/', f'{SCORE_PREFIX}/', *prefixes_of_tasks]
    return [f'{prefix}*' for prefix in dict.fromkeys(prefixes)]


@dataclass(slots=True, eq=False)
class TensorboardScalars:
    """The values of evaluations in a TensorBoard folder, by key and step, with the layout of Custom Scalars."""

    logged: dict[tuple[str, int], float] = field(default_factory=dict)
    is_open: bool = False

    def log(self, writer: SummaryWriter, values: Mapping[str, float], batch: int) -> None:
        """Write the values to disk at once, and before the first ones the layout of Custom Scalars.

        After a resume, values that the folder already holds are not written again.
        """
        if not self.is_open:
            writer.flush()
            self.logged = scalars_in(Path(writer.log_dir))
            if not self.logged:
                writer.add_custom_scalars(tensorboard_layout(values))
            self.is_open = True
        rounded = {key: float(np.float32(value)) for key, value in values.items()}
        for key in missing(self.logged, rounded, batch, 'TensorboardLogger'):
            writer.add_scalar(key, values[key], global_step=batch)
            self.logged[key, batch] = rounded[key]
        writer.flush()


def tensorboard_layout(keys: Iterable[str]) -> dict[str, dict[str, list[Any]]]:
    """Return the charts with at least one of the keys, by section."""
    logged = list(keys)
    layout: dict[str, dict[str, list[Any]]] = {}
    for section, charts in TENSORBOARD_CHARTS.items():
        for title, (kind, patterns) in charts.items():
            (pattern,) = patterns
            if any(re.match(pattern, key) for key in logged):
                layout.setdefault(section, {})[title] = [kind, patterns]
    return layout


def scalars_in(folder: Path) -> dict[tuple[str, int], float]:
    """Return the values in a folder's TensorBoard files that have any of ours, by key and step."""
    from tensorboard.backend.event_processing import event_file_loader  # type: ignore[import-untyped]

    scalars = {}
    for path in sorted(folder.glob('*.tfevents.*')):
        if BATCH.encode() not in path.read_bytes():
            continue  # no evaluation in it, as in most files of a long training
        for event in event_file_loader.LegacyEventFileLoader(str(path)).Load():
            scalars.update({(value.tag, event.step): value.simple_value for value in event.summary.value})
    return scalars


@dataclass(slots=True, eq=False)
class MlflowSender:
    """Send evaluations to a run of MLflow from a thread, and wait a limited time until they are confirmed.

    * `open_run` returns the id of the run; the thread calls it before the first values are sent.
    * `name` is that of the logger in warnings.
    * `rename` and `ignore` are the `rename_metrics` and `ignore_metrics` of Composer's logger.
    """

    tracking_uri: str
    open_run: Callable[[MlflowClient], str]
    name: str
    rename: Mapping[str, str] = field(default_factory=dict)
    ignore: Sequence[str] = ()
    run_id: str | None = None
    # Evaluations that are not confirmed: step, Unix time in milliseconds, and values.
    waiting: deque[tuple[int, int, dict[str, float]]] = field(default_factory=deque)
    thread: threading.Thread | None = None
    error: BaseException | None = None

    def send(self, values: Mapping[str, float], batch: int) -> None:
        """Send the values of an evaluation, and those of earlier ones that were not confirmed.

        Raise TimeoutError, or the error of MLflow; the values are kept for the next call.
        """
        wanted = {
            self.rename.get(key, key): value
            for key, value in values.items()
            if not any(fnmatch.fnmatch(key, pattern) for pattern in self.ignore)
        }
        self.wait()
        self.waiting.append((batch, time.time_ns() // 1_000_000, wanted))
        self.send_within_limit()

    def finish(self, end_run: EndRun) -> None:
        """Send what was not confirmed, and call `end_run` with client and id of the run. Raise as `send` does."""
        self.wait()
        self.send_within_limit(end_run)

    def wait(self) -> None:
        """Wait a limited time for the thread, which may still be sending earlier evaluations."""
        if self.thread is not None:
            self.thread.join(MLFLOW_WAIT_SECONDS)

    def send_within_limit(self, end_run: EndRun | None = None) -> None:
        """Start the thread unless it is still sending, and wait a limited time until it is done."""
        if self.thread is None or not self.thread.is_alive():
            self.error = None
            self.thread = threading.Thread(target=self.send_waiting, args=(end_run,), daemon=True)
            self.thread.start()
            self.thread.join(MLFLOW_WAIT_SECONDS)
        if self.thread.is_alive():
            waiting = plural(len(self.waiting), 'evaluation')
            raise TimeoutError(f'{self.tracking_uri} does not answer; waiting: {waiting}')
        if self.error is not None:
            raise self.error
        if self.waiting:
            raise RuntimeError(f'the thread that writes to {self.tracking_uri} failed')

    def send_waiting(self, end_run: EndRun | None) -> None:
        """Open the run and send all waiting values; stop at the first error and keep it. The thread runs this."""
        from mlflow import MlflowClient

        with logger_errors(self) as caught:
            client = MlflowClient(self.tracking_uri)
            if self.run_id is None:
                self.run_id = self.open_run(client)
            while self.waiting:
                self.send_first(client, self.run_id)
                self.waiting.popleft()
            if end_run is not None:
                end_run(client, self.run_id)
        self.error = caught.error

    def send_first(self, client: MlflowClient, run_id: str) -> None:
        """Send the first of the waiting evaluations, without the values that the run already has."""
        from mlflow.entities import Metric

        batch, time_ms, values = self.waiting[0]
        batch_key = self.rename.get(BATCH, BATCH)
        logged: dict[tuple[str, int], float] = {}
        # Only a repeated evaluation needs to know what the server has, a request for each key.
        evaluated_batches = [point.step for point in client.get_metric_history(run_id, batch_key)]
        if batch in evaluated_batches:
            for key in values:
                for point in client.get_metric_history(run_id, key):
                    logged[key, point.step] = point.value
        new = missing(logged, values, batch, self.name)
        points = [Metric(key, values[key], time_ms, batch) for key in new]  # type: ignore[no-untyped-call]
        client.log_batch(run_id, points, synchronous=True)
