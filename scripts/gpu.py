"""Check this package on one GPU: a line per check, PASS or FAIL with its figures and what is allowed.

    make gpu [QUICK=1]      (or: .venv/bin/python scripts/gpu.py [--quick] [--device cpu] [--only parity,layouts])

About 15 minutes on an H200, 5 with --quick. Without a GPU there is nothing to check, which is no failure; with
`--device cpu --quick` the same checks run on a CPU, with a smaller model and no targets for speed.

parity    the items of llm-foundry recorded on a CPU (tests/fixtures/reference), in fp32 and under bf16 autocast
layouts   all families of tests/networks.py in the batch layout that the probe chooses, against bare forwards in fp32
fsdp      a model under Composer's FSDP (NCCL, bf16; one rank) against the whole model, and training with and without
          evaluations, which must be equal bit by bit
speed     rows of `make bench` with a Llama of 1.1 billion random weights in bf16: ours from the files to the scores,
          transformers alone (a flash-attention forward over the unique tokens; `generate`), and lm-eval
memory    the peak of ours in these rows, at the tokens per batch chosen for this GPU

Parity and speed need the published files (--data-root); lm-eval needs `make reference`. Figures of the speed rows are
in runs/gpu/speed.json.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

for folder in ('tests', 'tests/integration', 'scripts/bench'):
    sys.path.insert(0, str(Path(__file__).parent.parent / folder))

import composer_training
import fsdp_worker
import networks
import recorded_cases
from composer.utils import dist
from contenders import load_all, running
from materials import LLAMA, LLAMA_1B, lively_folder, model_folder
from parts import BARE, GSM8K, LIKELIHOOD_ROWS, LM_EVAL, OURS, PARTS, Group, Place, TaskRow
from run import DATA_ROOTS, REFERENCE_PYTHON, Bench
from table import RowResult, rows_table
from transformers import AutoModelForCausalLM

from llmfoundry_gauntlet.engine.decoding import GenerationDecoder, end_ids
from llmfoundry_gauntlet.engine.generate import TextGenerator
from llmfoundry_gauntlet.engine.model import CausalLanguageModel
from llmfoundry_gauntlet.engine.plan import plan
from llmfoundry_gauntlet.engine.probe import probe, probe_generation

OUT = Path('runs/gpu')
FP32, BF16 = 'fp32', 'bf16'
# The limits: differences of mean losses in nats per token (mean and greatest), the least share of equal choices,
# and the lead of a token's logit below which another one may be generated.
LOSS = {FP32: (1e-5, 1e-4), BF16: (0.02, 0.2)}
SAME_CHOICES = {FP32: 0.999, BF16: 0.95}
LEAD = {FP32: 1e-3, BF16: 0.1}
UNTRAINED = {FP32: 1e-5, BF16: 0.5}  # nats per token for tests/networks.py, whose logits are larger than real ones
MORE_ITEMS = 8  # times those of the bench, as a GPU takes little time for each
SCORING = Group('scoring', {f'{LM_EVAL}/{OURS}': 3, f'{OURS}/{BARE}': 1.15})
GENERATION = Group('generation', {f'{LM_EVAL}/{OURS}': 2, f'{BARE}/{OURS}': 2})
CASES_OF_QUICK = 8  # every eighth recorded case


class Skipped(Exception):
    """A check cannot run here; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The device of the checks and their size."""

    device: str
    quick: bool
    data_root: Path

    def cases(self, recorded: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the recorded cases to compare."""
        return recorded['cases'][:: CASES_OF_QUICK if self.quick else 1]


Figures = Iterator[tuple[bool, str]]  # passed, and the figures with what is allowed


def autocast(options: Options, dtype: str) -> Any:
    return contextlib.nullcontext() if dtype == FP32 else torch.autocast(options.device, torch.bfloat16)


def fixture(options: Options, model: str, **settings: Any) -> CausalLanguageModel:
    """Return a model of the recordings on the device."""
    network = AutoModelForCausalLM.from_pretrained(recorded_cases.FIXTURES / 'models' / model).eval().to(options.device)
    return CausalLanguageModel(network, device=torch.device(options.device), **settings)


def published(options: Options) -> Path:
    if not (options.data_root / 'world_knowledge').is_dir():
        raise Skipped(f'{options.data_root} has no published files; gauntlet data fetch, then --data-root')
    return options.data_root


def parity(options: Options) -> Figures:
    """Compare log-probabilities, choices and generations with the recordings."""
    for model in recorded_cases.MODELS:
        for dtype in (FP32, BF16):
            with autocast(options, dtype), tempfile.TemporaryDirectory() as folder:
                yield score_parity(options, model, dtype, Path(folder))
                yield generation_parity(options, model, dtype, Path(folder))


def score_parity(options: Options, model: str, dtype: str, folder: Path) -> tuple[bool, str]:
    """Compare the losses and predictions of a model with those recorded."""
    language_model = fixture(options, model)
    layout = probe(language_model, vocabulary=len(recorded_cases.encoder(model).tokenizer), longest=200).layout
    errors: list[float] = []  # of each choice, in nats per token
    is_same: list[bool] = []  # the prediction of each item
    for case in options.cases(recorded_cases.recorded(model)):
        planned = recorded_cases.plan_case(model, case, published(options), folder, layout, semantics='reference')
        outputs = networks.run(language_model, planned.batches)
        results = {case['rows'][key.row]: result for key, result in planned.results(outputs.values()).items()}
        for item in case['items']:
            result = results[item['row']]
            losses = [-float(logprobs.mean()) for logprobs in outputs[result.key].logprobs]
            errors += np.abs(np.subtract(losses, item['losses'])).tolist()
            if 'matches' in item:  # a single continuation, which is predicted or not
                is_same.append(bool(item['prediction']) == (result.predicted is not None))
            else:
                is_same.append(result.predicted == item['prediction'])

    most_mean, most = LOSS[dtype]
    mean = np.mean(errors)
    passed = bool(mean <= most_mean and max(errors) <= most and np.mean(is_same) >= SAME_CHOICES[dtype])
    return passed, (
        f'{model} {dtype}, {layout}: losses of {len(errors)} choices differ by {mean:.1e} nats per token on average '
        f'(allowed {most_mean:g}), at most {max(errors):.1e} ({most:g}); {sum(is_same)} of {len(is_same)} predictions '
        f'equal ({SAME_CHOICES[dtype]:.1%})'
    )


def generation_parity(options: Options, model: str, dtype: str, folder: Path) -> tuple[bool, str]:
    """Compare the generations of a model with those recorded."""
    recorded = recorded_cases.recorded(f'generation_{model}')
    language_model = fixture(options, model, hidden_token_id=recorded['pad_token_id'])
    tokenizer = recorded_cases.encoder(model).tokenizer
    decoder = GenerationDecoder(tokenizer, end_ids(tokenizer, language_model.model, reference=True))
    generator = TextGenerator(language_model, decoder)
    generator.layout = probe_generation(generator, vocabulary=len(tokenizer), longest=200).layout
    is_same: list[bool] = []
    must_be_same: list[bool] = []  # as each token leads by more than rounding changes
    for case in options.cases(recorded):
        planned = recorded_cases.plan_case(model, case, published(options), folder, semantics='reference')
        item_of_row = {item['row']: item for item in case['items']}
        generations = {}
        for batch in planned.continuous_batches:
            generations.update({generation.key: generation for generation in generator.run(batch)})
        for key, result in planned.results(generations.values()).items():
            item = item_of_row[case['rows'][key.row]]
            if 'before_stop' in item:
                is_same.append(recorded_cases.digest(result.text) == item['before_stop'])
            else:
                is_same.append(recorded_cases.digest(generations[key].text) == item['output'])
            must_be_same.append(item['margin'] > LEAD[dtype])

    num_wrong = sum(must and not same for must, same in zip(must_be_same, is_same, strict=True))
    return num_wrong == 0, (
        f'{model} {dtype}, {generator.layout}: {sum(is_same)} of {len(is_same)} texts equal; of the '
        f'{sum(must_be_same)} in which each token leads by {LEAD[dtype]:g}, {num_wrong} differ (allowed 0)'
    )


def layouts(options: Options) -> Figures:
    """Compare every family in the layout that its probe chooses with bare forwards in fp32 on a CPU."""
    requests = networks.mixed_requests()
    for dtype in (FP32, BF16):
        unexpected: list[str] = []  # layouts that the probe should not choose
        errors: dict[str, float] = {}  # by family, in nats per token
        for family in networks.FAMILIES:
            expected = networks.sums_alone(networks.network(family), requests)
            network = networks.network(family).to(options.device)
            language_model = CausalLanguageModel(network, device=torch.device(options.device))
            with autocast(options, dtype):
                probed = probe(language_model, vocabulary=networks.VOCABULARY, longest=60)
                batches = plan(requests, tokens_per_batch=networks.PREFIX_BUDGET, layout=probed.layout)
                sums = networks.sums_of(networks.run(language_model, batches), requests)
            if probed.layout != networks.LAYOUT_OF[family]:
                unexpected.append(f'{family}: {probed}')
            lengths = [len(ids) for request in requests for ids in request.continuations]
            errors[family] = float(np.max(np.abs(sums - expected) / lengths))
        worst = max(errors, key=lambda family: errors[family])
        figures = (
            f'{len(errors)} families in {dtype}: log-probabilities within {errors[worst]:.1e} nats per token, the most '
            f'in {worst} (allowed {UNTRAINED[dtype]:g}); slower than the expected layout '
            f'({"allowed" if dtype == BF16 else "not allowed"}): {"; ".join(unexpected) or "none"}'
        )
        yield errors[worst] <= UNTRAINED[dtype] and (dtype == BF16 or not unexpected), figures


def fsdp(options: Options) -> Figures:
    """Compare a sharded model with a whole one, and training with evaluations with training without."""
    device = 'cpu' if options.device == 'cpu' else 'gpu'
    if device == 'cpu':
        composer_training.shard_on_cpu()
    dist.initialize_dist(device, timeout=60.0)
    modes = ('unsharded', 'sharded')
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        fsdp_worker.write_tasks(folder)
        evaluated = {mode: fsdp_worker.run(folder, 'llama', mode, device=device) for mode in modes}
        without = {mode: fsdp_worker.trained(folder, 'llama', mode, device) for mode in modes}
    dtype, about = (FP32, 'fp32 with gloo') if device == 'cpu' else (BF16, 'bf16 with NCCL')
    whole = items_of_tasks(evaluated['unsharded'])
    sharded = items_of_tasks(evaluated['sharded'])
    scored = [key for key, item in whole.items() if item[2]]
    error = max(np.max(np.abs(np.subtract(whole[key][2], sharded[key][2]))) for key in scored)
    same = np.mean([whole[key][0] == sharded[key][0] for key in scored])
    most = 10 * UNTRAINED[dtype]  # of summed log-probabilities
    yield (
        bool(error <= most and same >= SAME_CHOICES[dtype]),
        (
            f'one rank in {about}: log-probabilities of {len(scored)} items within {error:.1e} nats of the whole model '
            f'(allowed {most:g}), {same:.1%} of predictions equal (allowed {SAME_CHOICES[dtype]:.1%})'
        ),
    )
    for mode in modes:
        equal = evaluated[mode]['weights'] == without[mode]['weights']
        yield equal, f'{mode} training with evaluations is {"" if equal else "not "}bitwise that without'


def items_of_tasks(results: dict[str, Any]) -> dict[str, Any]:
    """Return the items of all tasks of a worker's evaluation."""
    items: dict[str, Any] = {}
    for task in fsdp_worker.TASKS:
        items |= results[task]['items']
    return items


def gpu_rows(options: Options) -> tuple[TaskRow, ...]:
    """Return the rows of the bench with our targets, and the generation row whose texts all reach the limit."""
    rows = [(row, SCORING) for row in LIKELIHOOD_ROWS]
    rows.append((replace(GSM8K, max_new_tokens=64, end_scale=0.0), GENERATION))
    factor = MORE_ITEMS
    if options.device == 'cpu':  # two rows, of as many items as in the bench
        rows = rows[:: len(rows) // 2]
        factor = 1
    return tuple(replace(row, group=group, items=(factor * row.items[0], factor * row.items[1])) for row, group in rows)


@functools.cache
def measured(options: Options) -> tuple[RowResult, ...]:
    """Run the rows with all contenders that are installed here."""
    data_root = published(options)
    of_class = PARTS['families'].contenders
    names = [name for name in of_class if name != LM_EVAL or Path(REFERENCE_PYTHON).exists()]
    commands = {name: (REFERENCE_PYTHON if name == LM_EVAL else sys.executable, of_class[name]) for name in names}
    is_cpu = options.device == 'cpu'
    family, vocabulary, dtype = (LLAMA, 8_000, 'float32') if is_cpu else (LLAMA_1B, 50_000, 'bfloat16')
    base = model_folder(vocabulary, str(data_root), OUT / 'models', family)
    results, loaded = [], None
    with running(commands, OUT, options.device) as contenders:
        bench = Bench(
            contenders=contenders,
            rounds=dict.fromkeys(commands, 1 if options.quick else 3),
            quick=options.quick,
            place=Place(data_root, OUT / 'rows'),
            device=options.device,
            lm_eval_batch_sizes=(8, 16, 32) if is_cpu else (16, 32, 64),
        )
        for row in gpu_rows(options):
            folder = base if row.end_scale is None else lively_folder(base, row.end_scale)
            if folder != loaded:
                print(load_all(contenders, folder, device=options.device, dtype=dtype)[OURS]['layouts'], flush=True)
                loaded = folder
            results.append(bench.run_row(row, vocabulary))
            print(rows_table(results[-1:]), flush=True)
    (OUT / 'speed.json').write_text(json.dumps([result.as_json() for result in results], indent=1) + '\n', 'utf-8')
    return tuple(results)


def speed(options: Options) -> Figures:
    """Compare the geometric mean of each ratio with its target; on a CPU the target is not that of the bench."""
    for group in (SCORING, GENERATION):
        results = [result for result in measured(options) if result.row.group is group]
        for ratio, target in group.targets.items():
            values = [result.ratios[ratio] for result in results if ratio in result.ratios]
            if not values:
                yield True, f'{group.name}: no {ratio}, as {REFERENCE_PYTHON} is absent; `make reference` makes it'
                continue
            mean = float(np.exp(np.mean(np.log(values))))
            sign = '<=' if ratio.startswith(f'{OURS}/') else '>='
            each = ', '.join(f'{value:.2f}' for value in values)
            passed = options.device == 'cpu' or group.is_met(ratio, mean)
            yield passed, f'{group.name}: seconds of {ratio} {mean:.2f} (target {sign} {target:g}); rows {each}'
        yield True, f'{group.name}: tokens per second of ours: {", ".join(map(rate, results))}'


def rate(result: RowResult) -> str:
    """Return the tokens per second that ours gave to the model, or for a generation task those that it wrote."""
    ours = result.rounds[OURS][0]
    shape = ours['shape']
    tokens = shape['num_tokens'] if 'num_tokens' in shape else len(shape['contexts']) * shape['max_new_tokens']
    return f'{result.row.name} {tokens / ours["num_items"] / result.seconds(OURS):,.0f}'


def memory(options: Options) -> Figures:
    """Report the peak of ours: a batch that did not fit would have been split, with a warning, and no error."""
    if options.device == 'cpu':
        raise Skipped('the memory of a CPU has no budget')
    total = torch.cuda.get_device_properties(0).total_memory
    for result in measured(options):
        ours = result.rounds[OURS][0]
        budget = ours['shape'].get('tokens_per_batch')
        yield (
            ours['peak_bytes'] <= 0.9 * total,
            (
                f'{result.row.name}: peak {ours["peak_bytes"] / 2**30:.1f} of {total / 2**30:.1f} GiB (allowed 90%)'
                + (f' with {budget} tokens per batch' if budget else '')
            ),
        )


CHECKS: dict[str, Callable[[Options], Figures]] = {
    check.__name__: check for check in (parity, layouts, fsdp, speed, memory)
}


def run(name: str, options: Options) -> list[str]:
    """Run one check, print its lines, and return the status of each: PASS, FAIL or SKIP."""
    statuses = []

    def report(status: str, text: str) -> None:
        statuses.append(status)
        print(f'{status}  {name:<8} {text}', flush=True)

    started = time.perf_counter()
    try:
        for passed, figures in CHECKS[name](options):
            report('PASS' if passed else 'FAIL', figures)
    except Skipped as reason:
        report('SKIP', str(reason))
    except Exception:  # noqa: BLE001  # the other checks still run
        report('FAIL', traceback.format_exc())
    print(f'      {name:<8} took {time.perf_counter() - started:.0f} s', flush=True)
    return statuses


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--device', choices=('cuda', 'cpu'), default='cuda')
    parser.add_argument('--quick', action='store_true', help='fewer recorded cases, items and rounds')
    parser.add_argument('--only', default=','.join(CHECKS), help=f'of {",".join(CHECKS)}')
    parser.add_argument('--data-root', type=Path, default=next(root for root in map(Path, DATA_ROOTS) if root.is_dir()))
    given = parser.parse_args()
    if given.device == 'cuda' and not torch.cuda.is_available():
        print('SKIP: torch finds no GPU here; scripts/gpu.py --device cpu --quick runs the same checks on a CPU')
        return 0
    where = torch.cuda.get_device_name() if given.device == 'cuda' else f'CPU, {torch.get_num_threads()} threads'
    print(f'{where}; torch {torch.__version__}', flush=True)
    options = Options(device=given.device, quick=given.quick, data_root=given.data_root)
    started = time.perf_counter()
    statuses = [status for name in given.only.split(',') for status in run(name, options)]
    counts = ', '.join(f'{statuses.count(status)} {status}' for status in ('PASS', 'FAIL', 'SKIP'))
    print(f'{counts} in {(time.perf_counter() - started) / 60:.1f} minutes')
    return 1 if 'FAIL' in statuses else 0


if __name__ == '__main__':
    sys.exit(main())
