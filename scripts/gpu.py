"""Check this package on one GPU, part by part. Every figure has its limit beside it.

    make gpu [QUICK=1] [PART="numbers fsdp"] [WHEELS=folder] [DATA_ROOT=folder] [PYTHON_GPU=python3]
    python3 scripts/gpu.py [--quick] [--part numbers fsdp] [--wheels folder] [--data-root folder] [--device cpu]
                           [--vllm-python python3]

It runs with the Python that has torch: without a network, without Composer, and without an environment of its own. The
package comes from this folder, and what that Python lacks from a folder of wheels (--wheels). A run takes at most ten
minutes for each part, with --quick five in all. Without a GPU there is nothing to check, which is no failure; with
`--device cpu` the parts run on a CPU with tiny shapes.

numbers     families of transformers in bf16, fp16 and fp32 against float64 on a CPU: scores and generations; with
            --data-root also recorded items of llm-foundry
layouts     the token stream through torch's variable-length attention against padded rows: forks, windows, caps, sinks,
            latent attention; kernels per layer, and waits of the host per batch
speed       scoring by models of 125M, 1B and 7B and a hybrid of 1B parameters, with random weights in bf16: ours, a
            bare flash-attention forward, lm-eval and, in a full run, vLLM where they are installed; where the time goes
memory      `tokens_per_batch: auto` fits into the memory; a device that runs out of it gives the same numbers
fsdp        a model under FSDP2 in a plain loop: evaluations in bf16 leave weights, optimizer and all else bitwise
generation  ours against transformers' `generate` and, in a full run, vLLM; a step with 1, 3, 5 and 9 tokens a slot
gauntlet    the whole Gauntlet on its sample data, and with --data-root on the published files

The results are in one file, written after every row. `--markdown` prints its tables, as docs/speed.md has them.
Exit status: 0 all within limits, 1 a limit is missed or a part was stopped, 2 the run cannot start, 3 an error in a
part or row.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parent.parent
# The package, the parts, contenders of the benchmark, and the networks and requests of the tests.
for folder in (ROOT / 'tests' / 'integration', ROOT / 'tests', ROOT / 'scripts' / 'bench', ROOT / 'scripts', ROOT):
    sys.path.insert(0, str(folder))

if missing := [module for module in ('torch', 'transformers') if find_spec(module) is None]:
    print(f'{sys.executable} has no {" and no ".join(missing)}: PYTHON_GPU names one that has', file=sys.stderr)
    sys.exit(2)

import torch
from gpu_check.machine import machine
from gpu_check.options import CPU, CUDA, Options
from gpu_check.results import ERROR, FAILED, STOPPED, Results, Rows
from gpu_check.tables import markdown
from gpu_check.wheels import MissingWheelsError, use_wheels

# The parts in their order, with their seconds on a GPU in a quick run. In a full one each has as many as it needs, at
# most the ten minutes of one command on most queues.
QUICK_SECONDS = {
    'numbers': 45,
    'layouts': 40,
    'speed': 75,
    'memory': 40,
    'fsdp': 20,
    'generation': 45,
    'gauntlet': 35,
}
MOST_SECONDS = 600
OUT = Path('runs/gpu/results.json')
STATUS_OF_MISS = 1
STATUS_OF_MISTAKE = 2
STATUS_OF_ERROR = 3


def arguments() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--device', choices=(CUDA, CPU), default=CUDA)
    parser.add_argument('--quick', action='store_true', help='fewer families, items and rounds: five minutes in all')
    parser.add_argument('--part', nargs='+', choices=tuple(QUICK_SECONDS), default=list(QUICK_SECONDS), metavar='NAME')
    parser.add_argument('--wheels', type=Path, help='a folder of wheels of the packages that this Python lacks')
    parser.add_argument('--data-root', type=Path, help='the published files, which `gauntlet data fetch` gets')
    parser.add_argument('--out', type=Path, default=OUT, help=f'the file of results, {OUT}')
    parser.add_argument('--vllm-python', default=sys.executable, help='the Python that has vLLM, if it is another one')
    parser.add_argument('--commit', help='the commit of these files, where there is no git')
    parser.add_argument('--markdown', action='store_true', help='print the tables of the file of results, and end')
    return parser.parse_args()


def run_part(name: str, options: Options, rows: Rows) -> None:
    """Run the module of a part, which is imported here so that an error of one leaves the others."""
    import_module(f'gpu_check.{name}').run(options, rows)


def main() -> int:
    """Run the parts, and return the exit status."""
    given = arguments()
    results = Results(given.out)
    if given.markdown:
        print(markdown(results.parts))
        return 0
    if given.device == CUDA and not torch.cuda.is_available():
        print('SKIP: torch finds no GPU here; scripts/gpu.py --device cpu runs the same parts on a CPU')
        return 0
    try:
        use_wheels(given.wheels)
    except MissingWheelsError as error:
        print(error, file=sys.stderr)
        return STATUS_OF_MISTAKE

    options = Options(
        device=given.device,
        quick=given.quick,
        data_root=given.data_root,
        folder=given.out.parent.absolute(),
        vllm_python=given.vllm_python,
    )
    about = {'quick': options.quick, 'machine': machine(options, given.commit)}
    print(', '.join(f'{name} {value}' for name, value in about['machine'].items()), flush=True)
    status_by_part: dict[str, str] = {}
    for name, quick_seconds in QUICK_SECONDS.items():
        if name not in given.part:
            continue
        most_seconds: float | None = quick_seconds if options.quick else MOST_SECONDS
        if options.is_cpu:  # which may be busy with anything else: there the parts take as long as they take
            most_seconds = None
        run = partial(run_part, name, options)
        status_by_part[name] = results.run_part(name, run, about=about, most_seconds=most_seconds)
    print(f'{", ".join(f"{name} {status}" for name, status in status_by_part.items())}; figures in {given.out}')
    if ERROR in status_by_part.values():
        return STATUS_OF_ERROR
    return STATUS_OF_MISS if {FAILED, STOPPED} & {*status_by_part.values()} else 0


if __name__ == '__main__':
    sys.exit(main())
