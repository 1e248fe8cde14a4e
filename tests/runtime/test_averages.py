"""Averages of checkpoints have the items of a folder with the mean of their weights; a watch evaluates each once.

Mutations: the sum is not divided; the newest is left out; the newest's batch normalization is averaged.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import networks
import object_store
import pytest
import tiny
import torch
import transformers
from safetensors.torch import save_file
from tiny import outcome, record

from llmfoundry_gauntlet import evaluate
from llmfoundry_gauntlet.config.run import ModelSettings
from llmfoundry_gauntlet.config.yaml import InvalidValuesError
from llmfoundry_gauntlet.data.stores import StoredFile
from llmfoundry_gauntlet.errors import ModelError, StoreError
from llmfoundry_gauntlet.results.runs import find_runs
from llmfoundry_gauntlet.runtime import gauntlet as gauntlet_module
from llmfoundry_gauntlet.runtime.averages import averages_of, mean_of
from llmfoundry_gauntlet.runtime.checkpoint_folders import find_checkpoints
from llmfoundry_gauntlet.runtime.checkpoints import StoredWeights
from llmfoundry_gauntlet.runtime.logged_values import scalars_in, wandb_patterns

BATCHES = (2, 4, 6, 8)
s3_server = object_store.s3_server
Gauntlet = Callable[..., tuple[int, str, str]]


def network_at(batch: int) -> Any:
    """Return a model with weights of its own for each batch."""
    network = networks.network('llama', vocab_size=259, max_position_embeddings=128)
    torch.manual_seed(batch)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.normal_(0.0, 0.2)
    return network


def expected_weights(batches: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Return the mean of the weights, by float32 numbers added in the order of the batches."""
    states = [network_at(batch).state_dict() for batch in batches]
    return {name: sum(state[name] for state in states) / len(states) for name in states[0]}


@pytest.fixture(scope='module')
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with tasks, the folders `checkpoint-2` to `checkpoint-8`, and the mean of the last three."""
    folder = tmp_path_factory.mktemp('run')
    tiny.write_tasks(folder)
    for batch in BATCHES:
        tiny.save(network_at(batch), folder / f'checkpoints/checkpoint-{batch}')
    mean = network_at(8)
    mean.load_state_dict(expected_weights((8, 6, 4)))
    tiny.save(mean, folder / 'mean')
    evaluate(folder / 'mean', **tiny.settings_of(folder), out=folder / 'of_mean', device='cpu')
    return folder


@pytest.fixture
def watch(run: Path, tmp_path: Path, gauntlet: Gauntlet) -> Gauntlet:
    """Run `gauntlet watch --average 3 --once` on a copy of the checkpoints."""
    shutil.copytree(run / 'checkpoints', tmp_path / 'checkpoints')
    settings = tiny.settings_of(run).items()
    tasks = [word for name, value in settings for word in (f'--{name.replace("_", "-")}', value)]
    options = ['--out', tmp_path / 'out', '--device', 'cpu', '--settle', '0s', '--poll', '0.1s', '--once']

    def call(*more: Any, folder: Any = tmp_path / 'checkpoints', average: int | None = 3) -> tuple[int, str, str]:
        averages = [] if average is None else ['--average', average]
        return gauntlet('watch', folder, *tasks, *options, *averages, *more)

    return call


def evaluations(log: pytest.LogCaptureFixture) -> list[str]:
    """Return the checkpoints and averages whose evaluation started since the last call."""
    started = [text.partition(':')[0] for text in log.messages if ': running by ' in text]
    log.clear()
    return started


def test_an_average_has_the_items_of_the_mean_of_the_weights(run: Path, tmp_path: Path, watch: Gauntlet, caplog):
    """Beside each checkpoint that has enough others before it, whose own evaluation is as without averages."""
    status, out, err = watch()

    assert status == 0, err
    averages = ['average_3/checkpoint-8', 'average_3/checkpoint-6']
    assert evaluations(caplog) == [
        'checkpoint-8',
        averages[0],
        'checkpoint-6',
        averages[1],
        'checkpoint-4',
        'checkpoint-2',
    ]
    assert '6 evaluations in ' in out.splitlines()[-1]
    samples, metrics = outcome(tmp_path / 'out/average_3/ba8'), outcome(run / 'of_mean')
    assert samples == metrics
    assert outcome(tmp_path / 'out/ba8') != outcome(run / 'of_mean')

    folder = tmp_path / 'checkpoints'
    written = record(tmp_path / 'out/average_3/ba8')
    assert written['model']['name'] == f'{folder}/checkpoint-8'
    assert written['model']['averaged_with'] == [f'{folder}/checkpoint-6', f'{folder}/checkpoint-4']
    assert written['training']['batch'] == 8
    assert record(tmp_path / 'out/ba8')['model']['averaged_with'] is None

    assert watch()[0] == 0
    assert evaluations(caplog) == []


def test_reports_and_comparisons_tell_averages_from_checkpoints(
    run: Path, tmp_path: Path, watch: Gauntlet, gauntlet: Gauntlet
):
    _, printed, _ = watch()
    assert 'average_3/ba8' in printed

    series = {run.name: [evaluation.name for evaluation in run.evaluations] for run in find_runs([tmp_path / 'out'])}
    assert sorted(series.values()) == [['average_3/ba6', 'average_3/ba8'], ['ba2', 'ba4', 'ba6', 'ba8']]

    # A trend, and what represents a run in comparisons, are of checkpoints unless averages are named.
    assert 'over 4 checkpoints, ba2 to ba8' in gauntlet('compare', tmp_path / 'out')[1]
    assert 'over 2 checkpoints, ba6 to ba8' in gauntlet('compare', tmp_path / 'out/average_3')[1]
    shutil.rmtree(tmp_path / 'out/ba8')  # so that the newest evaluation is an average
    status, compared, error = gauntlet('compare', tmp_path / 'out', tmp_path / 'out/average_3', '--format', 'markdown')
    assert status == 0, error
    weights = (
        f'the weights of {tmp_path}/out/ba6 are of one checkpoint, those of {tmp_path}/out/average_3/ba8 the mean of 3'
    )
    assert weights in compared + error


def test_fewer_checkpoints_than_an_average_takes_are_told_and_none_is_averaged(
    tmp_path: Path, watch: Gauntlet, caplog: pytest.LogCaptureFixture
):
    status, out, err = watch(average=5)

    assert status == 0, err
    assert [text for text in caplog.messages if text.startswith('average_5: none so far: it takes 5')]
    assert 'average_5' not in out
    assert not (tmp_path / 'out/average_5').exists()


def test_a_damaged_checkpoint_of_an_average_is_named_until_it_is_mended(
    tmp_path: Path, watch: Gauntlet, caplog: pytest.LogCaptureFixture
):
    weights = tmp_path / 'checkpoints/checkpoint-4/model.safetensors'
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])

    status, out, _ = watch()

    assert status == 1
    states = {line.partition(': ')[0]: line.partition(': ')[2] for line in out.splitlines()}
    for name in ('checkpoint-4', 'average_3/checkpoint-6', 'average_3/checkpoint-8'):
        assert states[name].startswith(f'damaged {weights}: cannot be read (')
    assert states['checkpoint-8'].startswith('done ')
    evaluations(caplog)

    weights.write_bytes(whole)
    assert watch()[0] == 0
    assert evaluations(caplog) == ['average_3/checkpoint-8', 'average_3/checkpoint-6', 'checkpoint-4']


def test_an_overwritten_checkpoint_is_averaged_again_and_a_deleted_one_changes_nothing(
    tmp_path: Path, watch: Gauntlet, caplog: pytest.LogCaptureFixture
):
    """A trainer that keeps its best checkpoint deletes others, so that the last three are no longer neighbours."""
    watch()
    evaluations(caplog)
    before = outcome(tmp_path / 'out/average_3/ba8')
    tiny.save(network_at(9), tmp_path / 'checkpoints/checkpoint-6')
    os.utime(tmp_path / 'checkpoints/checkpoint-6/model.safetensors', ns=(1, 1))

    watch()
    assert evaluations(caplog) == ['average_3/checkpoint-8', 'checkpoint-6', 'average_3/checkpoint-6']
    overwritten = outcome(tmp_path / 'out/average_3/ba8')
    assert overwritten != before

    shutil.rmtree(tmp_path / 'checkpoints/checkpoint-6')
    assert watch()[0] == 0
    assert evaluations(caplog) == []
    assert outcome(tmp_path / 'out/average_3/ba8') == overwritten


def test_an_interrupted_average_is_resumed(run: Path, tmp_path: Path, watch: Gauntlet, monkeypatch: pytest.MonkeyPatch):
    """The store fails when the records of the newest average are written, once; the next attempt has its journal."""
    write_records, failed = gauntlet_module.write_records, []

    def fail_once(folder: Path, *arguments: Any, **more: Any) -> None:
        if folder == tmp_path / 'out/average_3/ba8' and not failed:
            failed.append(folder)
            raise StoreError('the store is away')
        write_records(folder, *arguments, **more)

    monkeypatch.setattr(gauntlet_module, 'write_records', fail_once)

    status, _, error = watch()

    assert status == 0, error
    assert failed
    assert record(tmp_path / 'out/average_3/ba8')['timing']['reused_items'] == 28
    assert record(tmp_path / 'out/average_3/ba6')['timing']['reused_items'] == 0
    assert outcome(tmp_path / 'out/average_3/ba8') == outcome(run / 'of_mean')


def test_metrics_of_an_average_are_logged_under_its_name_at_the_step_of_the_newest(
    run: Path, tmp_path: Path, watch: Gauntlet, gauntlet: Gauntlet
):
    (tmp_path / 'train.yaml').write_text(
        json.dumps(
            {
                'run_name': 'tiny',
                'callbacks': {'eval_gauntlet': {**tiny.settings_of(run), 'save_folder': str(tmp_path / 'out')}},
                'loggers': {'tensorboard': {'log_dir': str(tmp_path / 'boards')}},
            }
        )
    )
    timing = ['--once', '--settle', '0s', '--poll', '0.1s', '--average', 3, '--device', 'cpu']

    status, _, err = gauntlet('watch', tmp_path / 'checkpoints', '--train-yaml', tmp_path / 'train.yaml', *timing)

    assert status == 0, err
    logged = scalars_in(tmp_path / 'boards/tiny')
    key = 'metrics/sums/2-shot/InContextLearningLMAccuracy'
    for batch in (6, 8):
        of_average = record(tmp_path / f'out/average_3/ba{batch}')['metrics'][key]
        assert logged[f'average_3/{key}', batch] == pytest.approx(of_average)
    assert {step for name, step in logged if name == key} == set(BATCHES)
    assert {step for name, step in logged if name.startswith('average_3/')} == {6, 8}
    assert 'average_3/*' in wandb_patterns(name for name, _ in logged)


def test_averages_in_an_object_store_are_those_of_local_checkpoints(
    run: Path, tmp_path: Path, watch: Gauntlet, s3_server: Any
):
    for path in sorted((run / 'checkpoints').rglob('*')):
        if path.is_file() and path.parent.name != 'checkpoint-2':
            key = path.relative_to(run / 'checkpoints').as_posix()
            s3_server.client.upload_file(str(path), s3_server.bucket, f'run/{key}')

    status, out, err = watch(folder=s3_server.uri('run'))

    assert status == 0, out + err
    assert outcome(tmp_path / 'out/average_3/ba8') == outcome(run / 'of_mean')
    others = record(tmp_path / 'out/average_3/ba8')['model']['averaged_with']
    assert others == [s3_server.uri('run/checkpoint-6'), s3_server.uri('run/checkpoint-4')]


FORMS: dict[str, Callable[[Any, Path], object]] = {
    'hugging_face': lambda network, path: tiny.save(network, path),
    'composer.pt': lambda network, path: torch.save(tiny.content_of(network), path),
    'composer_sharded': lambda network, path: tiny.save_sharded(tiny.content_of(network), path),
    'loop.pt': lambda network, path: torch.save({'model': network.state_dict()}, path),
    'compiled.pt': lambda network, path: torch.save(
        {f'_orig_mod.{name}': tensor for name, tensor in network.state_dict().items()}, path
    ),
    'weights.safetensors': lambda network, path: save_file(network.state_dict(), path),
    'sharded': lambda network, path: tiny.save_sharded(network.state_dict(), path),
}


@pytest.mark.parametrize('form', FORMS)
def test_checkpoints_of_every_form_are_averaged(run: Path, tmp_path: Path, form: str):
    """And of several forms together: the second is a Hugging Face folder."""
    paths = [tmp_path / f'{batch}-{form}' for batch in (8, 6, 4)]
    for path, batch in zip(paths, (8, 6, 4), strict=True):
        FORMS[form](network_at(batch), path)
    paths[1] = run / 'checkpoints/checkpoint-6'
    given = {'model_config': run / 'mean', 'tokenizer': run / 'mean'}

    evaluate(paths[0], averaged_with=paths[1:], **tiny.settings_of(run), **given, out=tmp_path / 'out', device='cpu')

    assert outcome(tmp_path / 'out') == outcome(run / 'of_mean')


def stored(is_mapped: bool = True, **tensors: torch.Tensor) -> Callable[[], StoredWeights]:
    return lambda: StoredWeights(tensors=tensors, is_mapped=is_mapped)


@pytest.mark.parametrize('is_mapped', [False, True])
def test_a_mean_is_in_float32_or_wider_and_integers_are_the_newests(is_mapped: bool):
    """In bfloat16 the sum of 256 and 1 would be 256. What belongs to a file keeps its values."""
    newest = {
        'half': torch.tensor([256.0]).bfloat16(),
        'wide': torch.tensor([1.0 + 2.0**-40], dtype=torch.float64),
        'single': torch.tensor([1.0]),
        'count': torch.tensor([7]),
    }
    older = {
        'half': torch.tensor([1.0]).bfloat16(),
        'wide': torch.tensor([1.0]).double(),
        'single': torch.tensor([2.0]).bfloat16(),
        'count': torch.tensor([5]),
    }
    kept = {name: tensor.clone() for name, tensor in newest.items()}

    mean = mean_of({'b': stored(is_mapped, **newest), 'a': stored(is_mapped, **older)})()

    assert mean.tensors['half'].tolist() == [128.5]
    assert mean.tensors['half'].dtype == torch.float32
    assert mean.tensors['wide'].tolist() == [1.0 + 2.0**-41]
    assert mean.tensors['single'].tolist() == [1.5]
    assert mean.tensors['count'].tolist() == [7]
    assert not mean.is_mapped
    if is_mapped:
        assert all(torch.equal(tensor, kept[name]) for name, tensor in newest.items())


@pytest.mark.parametrize(
    'other',
    [
        {'w': torch.ones(3)},
        {'w': torch.ones(2), 'v': torch.ones(2)},
        {'v': torch.ones(2)},
    ],
)
def test_checkpoints_with_other_weights_are_no_average(other: dict[str, torch.Tensor]):
    read = mean_of({'new.pt': stored(w=torch.ones(2)), 'old.pt': stored(**other)})

    with pytest.raises(ModelError, match=r'^old\.pt: its weights are not those of new\.pt in name and shape: '):
        read()


def test_one_checkpoint_is_read_at_a_time():
    """Mutation: all are read at first."""
    events = []

    def reader(name: str) -> Callable[[], StoredWeights]:
        def read() -> StoredWeights:
            events.append(name)
            return StoredWeights(tensors={'w': Watched(events, name)}, is_mapped=True)

        return read

    mean_of({name: reader(name) for name in ('c', 'b', 'a')})()

    assert events == ['c', 'c is gone', 'b', 'b is gone', 'a', 'a is gone']


class Watched(torch.Tensor):
    """A tensor that says when nothing refers to it any more."""

    def __new__(cls, events: list[str], name: str) -> Watched:
        made = torch.Tensor._make_subclass(cls, torch.ones(2))
        made.events, made.label = events, name
        return made

    def __del__(self) -> None:
        if hasattr(self, 'events'):
            self.events.append(f'{self.label} is gone')


def names_of_averages(names: list[str], size: int) -> list[list[str]]:
    checkpoints = find_checkpoints([StoredFile(name, 1, 'v1') for name in names])
    return [[member.name for member in average.members] for average in averages_of(checkpoints, size)]


def test_an_average_takes_neighbours_of_one_training_by_their_batches():
    """Epochs and the order of names do not count; another folder is another training."""
    names = ['a/ep0-ba9-rank0.pt', 'a/ep1-ba10-rank0.pt', 'a/ep1-ba11-rank0.pt', 'a/mine.pt']
    others = ['run1/step-9/.metadata', 'run2/step-10/.metadata', 'run2/step-12/.metadata']

    assert names_of_averages([*names, *others], 2) == [
        ['a/ep1-ba10-rank0.pt', 'a/ep0-ba9-rank0.pt'],
        ['a/ep1-ba11-rank0.pt', 'a/ep1-ba10-rank0.pt'],
        ['run2/step-12', 'run2/step-10'],
    ]


def test_an_average_has_a_new_version_when_a_member_has_and_a_new_name_for_claims_with_other_members():
    def averages(*versions: tuple[str, str]) -> Any:
        files = [StoredFile(f'ba{batch}.pt', 1, version) for batch, version in versions]
        return list(averages_of(find_checkpoints(files), 2))[-1]

    first = averages(('1', 'v1'), ('2', 'v1'), ('3', 'v1'))
    overwritten = averages(('1', 'v1'), ('2', 'v2'), ('3', 'v1'))
    deleted = averages(('1', 'v1'), ('3', 'v1'))

    assert first.batch == overwritten.batch == deleted.batch == 3
    assert first.claimed_name == overwritten.claimed_name
    assert first.version != overwritten.version
    assert first.claimed_name != deleted.claimed_name


def test_an_adapter_is_not_averaged():
    with pytest.raises(InvalidValuesError, match='averaged_with: is not allowed with an adapter'):
        ModelSettings(model='m', adapter='a', averaged_with=['n'])


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        (['--average', 1], '--average: is 1; allowed: a number of checkpoints, 2 or more'),
        (['--average', 3, '--model', 'base'], '--average: is not allowed with --model: '),
    ],
)
def test_options_that_are_not_allowed_end_the_watch(watch: Gauntlet, options: list[Any], message: str):
    status, _, error = watch(*options, average=None)

    assert status == 2
    assert message in error


def test_adapters_in_a_folder_are_evaluated_with_their_base(run: Path, tmp_path: Path, watch: Gauntlet):
    """As `gauntlet run --model BASE --adapter FOLDER`. Without the base it is named."""
    peft = pytest.importorskip('peft')
    folder = tmp_path / 'adapters'
    base = run / 'checkpoints/checkpoint-8'
    for batch in (2, 4):
        lora = peft.LoraConfig(r=4, target_modules=['q_proj'], init_lora_weights=False, task_type='CAUSAL_LM')
        torch.manual_seed(batch)
        network = transformers.AutoModelForCausalLM.from_pretrained(base)
        peft.get_peft_model(network, lora).save_pretrained(folder / f'checkpoint-{batch}')
        torch.save({'last_epoch': 1}, folder / f'checkpoint-{batch}/scheduler.pt')
    evaluate(base, adapter=folder / 'checkpoint-4', **tiny.settings_of(run), out=tmp_path / 'expected', device='cpu')

    status, out, _ = watch(folder=folder, average=None)
    assert status == 1
    assert f'{folder}/checkpoint-4: is a PEFT adapter; give its base with --model' in out

    status, out, error = watch('--model', base, folder=folder, average=None)
    assert status == 0, error
    assert outcome(tmp_path / 'out/ba4') == outcome(tmp_path / 'expected')
    assert outcome(tmp_path / 'out/ba2') != outcome(tmp_path / 'out/ba4')
    written = record(tmp_path / 'out/ba4')
    assert written['model']['name'] == str(base)
    assert written['model']['adapter'] == written['training']['checkpoint'] == f'{folder}/checkpoint-4'
