"""Options that several sub-commands of `gauntlet` have."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from llmfoundry_gauntlet.config.resources import PACKAGE
from llmfoundry_gauntlet.errors import ConfigError

Names = tuple[str, ...]
NOTHING: Mapping[str, Names] = {}
DEFAULTS = ('DEFAULT', 'DEFAULT_MAP')  # click's sources of a value that the user did not give

Tasks = Annotated[Path | None, typer.Option('--tasks', help='YAML file with the key icl_tasks.')]
Score = Annotated[Path | None, typer.Option('--score', help='YAML file with the key score.')]
Gauntlet = Annotated[Path | None, typer.Option('--gauntlet', help='YAML file with the key eval_gauntlet.')]
Semantics = Annotated[str, typer.Option(help="corrected, or reference: llm-foundry's scores.")]
Fewshot = Annotated[str, typer.Option(help='reference, or fixed: the same shots for all items.')]
Confinement = Annotated[
    str, typer.Option('--sandbox', help='Of programs: auto is isolation; rlimits and none do with less.')
]
DataRoot = Annotated[str, typer.Option('--data-root', help='Folder that the paths of data files are relative to.')]
Out = Annotated[
    Path | None, typer.Option('--out', help='Folder for results.json and samples/. With --dry-run none is needed.')
]
Model = Annotated[
    str | None, typer.Option(help='Composer checkpoint, also sharded, or Hugging Face folder or name; s3:// as well.')
]
Outputs = Annotated[Path | None, typer.Option(help="JSON lines with somebody else's answers, to be marked.")]
OfModel = Annotated[str | None, typer.Option(help="In place of the model's own.")]
Length = Annotated[int | None, typer.Option(help="Longest prompt in tokens. Default: the model's.")]
Tokens = Annotated[str, typer.Option(help='auto, or the tokens of a batch.')]
Device = Annotated[str | None, typer.Option(help='cpu or gpu. Default: a GPU where there is one.')]
Precision = Annotated[str | None, typer.Option(help='fp32, amp_bf16 or amp_fp16.')]
Truncation = Annotated[str | None, typer.Option(help='drop_shots or reference.')]
Recorded = Annotated[Path | None, typer.Option('--from', help='Folder of an earlier run, to be scored again.')]
Limit = Annotated[int | None, typer.Option('--limit', help='At most so many items of each task, the same always.')]
Budget = Annotated[
    str | None, typer.Option('--time-budget', help="What may be taken, such as '120s': the items that fit.")
]
Partial = Annotated[
    bool,
    typer.Option('--allow-missing', help='With --outputs or --from: score tasks over the items that have an answer.'),
]
Overwrite = Annotated[bool, typer.Option('--overwrite', help='Replace what is in --out.')]
Resume = Annotated[bool, typer.Option('--resume', help='Go on with an evaluation in --out that was cut off.')]
Repair = Annotated[bool, typer.Option('--repair-journal', help='With --resume: drop damaged lines of its journal.')]

CHECK_FAILED, MISTAKE, BROKEN = 1, 2, 3  # exit statuses
GAUNTLET_TASKS = PACKAGE / 'yamls' / 'tasks' / 'gauntlet_v0.1.yaml'  # of this package
GAUNTLET = GAUNTLET_TASKS.parent.parent / 'gauntlets' / 'eval_gauntlet_v0.1.yaml'


class Form(StrEnum):
    """Output formats of scores."""

    TABLE = 'table'
    MARKDOWN = 'markdown'
    CSV = 'csv'
    JSON = 'json'


Format = Annotated[Form, typer.Option('--format', help='A table for the terminal, or for others to read.')]
DryRun = Annotated[
    bool, typer.Option('--dry-run', help='Evaluate nothing; say how much there is and how long it takes.')
]


def check_options(
    context: typer.Context, *, needs: Mapping[str, Names] = NOTHING, excludes: Mapping[str, Names] = NOTHING
) -> None:
    """Raise one ConfigError that names every option which the user gave and which would have no effect.

    `needs` has, by option, those one of which must be given too; `excludes` has, by option, those that have no effect
    beside it. An option counts as given also with the value that is its default.
    """
    flags = {parameter.name: parameter.opts[0] for parameter in context.command.params if parameter.name is not None}
    sources = {name: context.get_parameter_source(name) for name in flags}
    given = [name for name, source in sources.items() if source is not None and source.name not in DEFAULTS]
    problems = []
    for name in given:
        if beside := [flags[other] for other in given if name in excludes.get(other, ())]:
            problems.append(f'{flags[name]}: has no effect with {" and ".join(beside)}; leave it out')
        elif name in needs and not {*needs[name]} & {*given}:
            others = ' or '.join(flags[other] for other in needs[name])
            problems.append(f'{flags[name]}: has no effect without {others}; leave it out')
    if problems:
        raise ConfigError(problems)
