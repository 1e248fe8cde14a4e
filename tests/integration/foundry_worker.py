"""llm-foundry's own MPT and training, in its environment: python foundry_worker.py COMMAND OUT [ARGUMENT].

* mpt: scores and generates with each setting of MPT, by our engine and by bare forwards
* parity DATA_ROOT: evaluates two models with llm-foundry and with our callback
* train CONFIG: trains with our callback
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import generations
import networks
import torch
from composer import Trainer
from llmfoundry.command_utils import train_from_yaml
from llmfoundry.models.mpt import MPTConfig, MPTForCausalLM
from llmfoundry.utils.builders import build_composer_model, build_tokenizer
from networks import CPU, PREFIX_BUDGET, VOCABULARY
from record_generation import GenerationRecorder
from record_reference import BatchRecorder, evaluate, read_cases, write_subset
from recording import FIXTURES, digest

from llmfoundry_gauntlet import EvalGauntlet
from llmfoundry_gauntlet.engine.decoding import GenerationDecoder
from llmfoundry_gauntlet.engine.generate import TextGenerator
from llmfoundry_gauntlet.engine.model import CausalLanguageModel
from llmfoundry_gauntlet.engine.plan import plan
from llmfoundry_gauntlet.engine.probe import probe, probe_generation
from llmfoundry_gauntlet.scoring.text import normalize_answer

LONGEST = 60
TORCH = {'attn_impl': 'torch'}
ALIBI = {**TORCH, 'alibi': True}
ROPE = {**TORCH, 'rope': True, 'rope_hf_config': {'type': 'no_scaling', 'factor': 1.0}, 'rope_impl': 'hf'}
REUSED = {
    'order': [{'name': 'default'}, {'name': 'reuse'}, {'name': 'default'}, {'name': 'slide'}],
    'overrides': {
        'reuse': {'attn_config': {'reuse_kv_layer_idx': -1}},
        'slide': {'attn_config': {'sliding_window_size': 4}},
    },
}
CASES: dict[str, dict[str, Any]] = {
    'alibi': {'attn_config': ALIBI},
    'rope': {'attn_config': ROPE},
    'learned positions': {'learned_pos_emb': True, 'attn_config': TORCH},
    'grouped queries, alibi': {
        'attn_config': {**ALIBI, 'attn_type': 'grouped_query_attention', 'kv_n_heads': 2, 'alibi_bias_max': 4}
    },
    'one key, rope': {'attn_config': {**ROPE, 'attn_type': 'multiquery_attention'}},
    'windows, rope': {'attn_config': {**ROPE, 'sliding_window_size': 8}},
    'windows, alibi': {'attn_config': {**ALIBI, 'sliding_window_size': 8}},
    'clipped and normed': {'attn_config': {**ROPE, 'clip_qkv': 0.5, 'qk_ln': True, 'softmax_scale': 0.2}},
    'separate projections': {'attn_config': {**ROPE, 'qk_gn': True, 'fused_qkv': False}},
    'caps, alibi': {
        'attn_config': {**ALIBI, 'attn_logit_softcapping': 3.0},
        'final_logit_softcapping': 2.0,
        'logit_scale': 0.3,
    },
    'untied, scaled': {'attn_config': ROPE, 'logit_scale': 'inv_sqrt_d_model', 'tie_word_embeddings': False},
    'sequence ids': {'attn_config': {**ALIBI, 'attn_uses_sequence_id': True}},
    'reused keys': {'n_layers': 4, 'attn_config': ROPE, 'block_overrides': REUSED},
    'temperature': {'attn_config': {**ROPE, 'attn_temperature_tuning': {'attn_scale': 0.1, 'floor_scale': 8}}},
}


MODELS = {'rotary_bos': ROPE, 'alibi_pad_eos': ALIBI}  # by the tokenizer
NUM_ROWS = 6
SCORED = ('lambada_openai/0-shot', 'copa/0-shot', 'winograd/3-shot', 'piqa/10-shot', 'openbook_qa_truncated/10-shot')
GENERATED = ('triviaqa_sm_sub/3-shot', 'gsm8k_8shot/0-shot')


def network(**settings: Any) -> MPTForCausalLM:
    """Return a tiny MPT with random weights."""
    torch.manual_seed(0)
    sizes = {'d_model': 32, 'n_heads': 4, 'n_layers': 2, 'expansion_ratio': 2, 'vocab_size': VOCABULARY}
    start = {'name': 'baseline_', 'init_std': 0.3}
    more = {'max_seq_len': 64, 'learned_pos_emb': False, 'init_config': start, **settings}
    return MPTForCausalLM(MPTConfig(**{**sizes, **more})).eval()


def measure(model: Any) -> dict[str, Any]:
    """Return the layouts of a model, its largest error in nats, and how many of its generations are right."""
    language_model = CausalLanguageModel(model, device=CPU)
    scoring = probe(language_model, vocabulary=VOCABULARY, longest=LONGEST)
    requests = networks.mixed_requests()
    batches = plan(requests, tokens_per_batch=PREFIX_BUDGET, layout=scoring.layout)
    sums = networks.sums_of(networks.run(language_model, batches), requests)
    generator = TextGenerator(language_model, GenerationDecoder(generations.Letters(), []))
    generation = probe_generation(generator, vocabulary=VOCABULARY, longest=LONGEST)
    generator.layout = generation.layout
    to_generate = generations.mixed_requests()
    texts = generations.texts(generator, to_generate)

    def last_logits(ids: Any) -> Any:
        return networks.logits_of(model, ids)[-1]

    ids_alone = [generations.by_bare_forwards(last_logits, request) for request in to_generate]
    return {
        'layouts': [scoring.layout, generation.layout],
        'reason': scoring.reason,
        'error': float(abs(sums - networks.sums_alone(model, requests)).max()),
        'wrong': [number for number, ids in enumerate(ids_alone) if texts[number] != generations.letters(ids)],
    }


class Parity:
    """The evaluations of a model by llm-foundry and by our callback."""

    def __init__(self, name: str, data_root: Path, folder: Path) -> None:
        tokenizer = build_tokenizer(str(FIXTURES / 'models' / name), {})
        torch.manual_seed(0)
        sizes = {'d_model': 64, 'n_heads': 4, 'n_layers': 2, 'expansion_ratio': 2, 'max_seq_len': 2048}
        more = {
            'vocab_size': len(tokenizer),
            'learned_pos_emb': False,
            'init_config': {'name': 'baseline_', 'init_std': 0.2},
            'loss_fn': 'torch_crossentropy',
            'attn_config': MODELS[name],
        }
        cfg = {**sizes, **more, 'init_device': 'cpu'}
        model = build_composer_model(name='mpt_causal_lm', tokenizer=tokenizer, cfg=cfg)
        self.logged: dict[str, float] = {}
        self.items: dict[str, list[dict[str, Any]]] = {}
        self.tasks: dict[str, dict[str, Any]] = {}
        for file, names, recorder in (
            ('reference_cases.yaml', SCORED, BatchRecorder()),
            ('generation_cases.yaml', GENERATED, GenerationRecorder()),
        ):
            cases = [case for case in read_cases(FIXTURES / file)['cases'] if case['name'] in names]
            subsets = [write_subset({**case, 'rows': {'first': NUM_ROWS}}, data_root, folder) for case in cases]
            tasks = {case['name']: task for case, (task, _, _) in zip(cases, subsets, strict=True)}
            done = evaluate([*tasks.values()], model, tokenizer, recorder=recorder, temporary=folder)
            done.trainer.close()
            self.logged |= done.logged
            self.items |= recorder.items
            self.tasks |= tasks
        self.callback = EvalGauntlet(
            tasks=[{**task, 'dataset_uri': Path(task['dataset_uri']).name} for task in self.tasks.values()],
            data_root=str(folder),
            max_seq_len=2048,
            semantics='reference',
            save_folder=None,
        )
        trainer = Trainer(model=model, callbacks=[self.callback], device='cpu', progress_bar=False)
        trainer.eval()
        trainer.close()

    def differences(self) -> dict[str, Any]:
        """Return the layouts, and by task the number of items, the largest differences, and the rows that differ."""
        evaluation, generator = self.callback.evaluation, self.callback.gauntlet.loop.runner.generator
        tasks = {}
        for name, items in self.items.items():
            pairs = [*zip(evaluation.results[name], items, strict=True)]
            loss_errors: list[float] = []
            for result, item in pairs:
                if result.logprobs:
                    choices = zip(result.logprobs, result.num_tokens, item.get('losses', ()), strict=True)
                    loss_errors += [abs(-logprob / num_tokens - loss) for logprob, num_tokens, loss in choices]
            logged = {key: value for key, value in self.logged.items() if key.startswith(f'metrics/{name}/')}
            tasks[name] = {
                'items': len(pairs),
                'loss': max(loss_errors, default=0.0),
                'metrics': max(abs(evaluation.metrics[key] - value) for key, value in logged.items()),
                'wrong': [result.key.row for result, item in pairs if self.differs(name, result, item)],
            }
        return {'layouts': [evaluation.planned.layout, generator.layout], 'tasks': tasks}

    def differs(self, name: str, result: Any, item: dict[str, Any]) -> bool:
        """Return whether an item has another prediction, number of tokens, answer or score."""
        if 'losses' in item:
            predicted = result.predicted if 'gold' in item else int(result.predicted is not None)
            return (predicted, list(result.num_tokens)) != (item['prediction'], item['num_tokens'])
        is_normalized = self.tasks[name].get('do_normalization', True)
        answer = normalize_answer(result.answer) if is_normalized else result.answer
        return (digest(answer), result.score) != (item['cleaned'], item['mark'])


def parity(data_root: str) -> dict[str, Any]:
    differences_of_model = {}
    for name in MODELS:
        with tempfile.TemporaryDirectory() as folder:
            differences_of_model[name] = Parity(name, Path(data_root), Path(folder)).differences()
    return differences_of_model


def train(config: str) -> dict[str, Any]:
    """Train; save the model beside the configuration."""
    trainer = train_from_yaml(config)
    callback = next(callback for callback in trainer.state.callbacks if isinstance(callback, EvalGauntlet))
    trainer.close()
    for part in (trainer.state.model.model, trainer.state.model.tokenizer):
        part.save_pretrained(Path(config).parent / 'model')
    return {
        'class': type(trainer.state.model).__name__,
        'metrics': dict(callback.evaluation.metrics),
        'max_seq_len': callback.settings.max_seq_len,
        'interval': callback.settings.interval,
    }


def mpt() -> dict[str, Any]:
    return {name: measure(network(**settings)) for name, settings in CASES.items()}


if __name__ == '__main__':
    command, out, *arguments = sys.argv[1:]
    Path(out).write_text(json.dumps({'mpt': mpt, 'parity': parity, 'train': train}[command](*arguments)))
