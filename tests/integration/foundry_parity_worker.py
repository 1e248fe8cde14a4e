"""Evaluate llm-foundry's own MPT with llm-foundry and with ours, in its environment; write how far apart they are.

python foundry_parity_worker.py DATA_ROOT OUT
"""

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from llmfoundry.utils.builders import build_composer_model, build_tokenizer
from record_generation import GenerationRecorder
from record_reference import BatchRecorder, case_metrics, case_record, evaluate, read_cases, write_subset
from recording import FIXTURES, digest

from llmfoundry_gauntlet.config.settings import decode_settings
from llmfoundry_gauntlet.engine.decoding import GenerationDecoder, end_ids
from llmfoundry_gauntlet.engine.generate import TextGenerator
from llmfoundry_gauntlet.engine.model import CausalLanguageModel
from llmfoundry_gauntlet.engine.probe import probe, probe_generation
from llmfoundry_gauntlet.evaluation.inputs import load_data
from llmfoundry_gauntlet.evaluation.run import PlannedEvaluation, conclude, plan_evaluation, prepare_evaluation
from llmfoundry_gauntlet.metrics.keys import task_values
from llmfoundry_gauntlet.scoring.text import normalize_answer
from llmfoundry_gauntlet.tasks.encode import Encoder

ROWS = 6
LONGEST = 2048
ALIBI = {'attn_impl': 'torch', 'alibi': True}
ROPE = {'attn_impl': 'torch', 'rope': True, 'rope_impl': 'hf', 'rope_hf_config': {'type': 'no_scaling', 'factor': 1.0}}
MODELS = {'rotary_bos': ROPE, 'alibi_pad_eos': ALIBI}  # by the tokenizer
SCORED = ('lambada_openai/0-shot', 'copa/0-shot', 'winograd/3-shot', 'piqa/10-shot', 'openbook_qa_truncated/10-shot')
GENERATED = ('triviaqa_sm_sub/3-shot', 'gsm8k_8shot/0-shot')


class Comparison:
    """One model evaluated by both, its cases over their first rows."""

    def __init__(self, name: str, data_root: Path, folder: Path) -> None:
        self.data_root = data_root
        self.folder = folder
        self.tokenizer = build_tokenizer(str(FIXTURES / 'models' / name), {})
        torch.manual_seed(0)
        sizes = {'d_model': 64, 'n_heads': 4, 'n_layers': 2, 'expansion_ratio': 2, 'max_seq_len': LONGEST}
        more = {
            'vocab_size': len(self.tokenizer),
            'learned_pos_emb': False,
            'init_config': {'name': 'baseline_', 'init_std': 0.2},
            'loss_fn': 'torch_crossentropy',
            'attn_config': MODELS[name],
        }
        self.model: Any = build_composer_model(
            name='mpt_causal_lm', tokenizer=self.tokenizer, cfg={**sizes, **more, 'init_device': 'cpu'}
        ).eval()
        hidden = self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else self.tokenizer.eos_token_id
        self.language_model = CausalLanguageModel(self.model.model, device=torch.device('cpu'))
        masking = CausalLanguageModel(self.model.model, device=torch.device('cpu'), hidden_token_id=hidden)
        ends = end_ids(self.tokenizer, self.model.model, reference=True)
        self.generator = TextGenerator(masking, GenerationDecoder(self.tokenizer, ends))

    def layouts(self) -> list[str]:
        """Return the layouts that the probes find; the generator uses its own from then on."""
        vocabulary = len(self.tokenizer)
        found = probe_generation(self.generator, vocabulary=vocabulary, longest=200)
        self.generator.layout = found.layout
        return [probe(self.language_model, vocabulary=vocabulary, longest=200).layout, found.layout]

    def plan(self, case: dict[str, Any], rows: list[int], semantics: str) -> PlannedEvaluation:
        """Plan a case over these rows."""
        lines = (self.data_root / case['path']).read_text('utf-8').split('\n')
        (self.folder / 'rows.jsonl').write_text(''.join(f'{lines[row]}\n' for row in rows), 'utf-8')
        task = {**case['task'], 'dataset_uri': 'rows.jsonl'}
        settings = {'tasks': [task], 'data_root': str(self.folder), 'semantics': semantics, 'truncation': 'reference'}
        prepared = prepare_evaluation(
            load_data(decode_settings(settings)), Encoder(self.tokenizer), max_seq_len=case['task']['max_seq_len']
        )
        return plan_evaluation(prepared, tokens_per_batch=4096)

    def run(self, cases: str, names: tuple[str, ...], recorder: Any) -> Iterator[tuple[dict[str, Any], list[Any], Any]]:
        """Evaluate cases with llm-foundry; yield each with its row numbers and rows, its metrics in the case."""
        chosen = [
            {**case, 'rows': {'first': ROWS}} for case in read_cases(FIXTURES / cases)['cases'] if case['name'] in names
        ]
        assert len(chosen) == len(names)
        subsets = [write_subset(case, self.data_root, self.folder) for case in chosen]
        tasks = [task for task, _, _ in subsets]
        done = evaluate(tasks, self.model, self.tokenizer, recorder=recorder, temporary=self.folder)
        for case, (_, numbers, rows) in zip(chosen, subsets, strict=True):
            yield {**case, 'metrics': case_metrics(case, done.logged)}, numbers, rows
        done.trainer.close()

    def scored(self) -> Iterator[dict[str, Any]]:
        """Yield the differences of each scored case: losses, predictions, metrics."""
        recorder = BatchRecorder()
        for case, numbers, rows in self.run('reference_cases.yaml', SCORED, recorder):
            planned = self.plan(case, numbers, 'corrected')
            outputs = {output.key: output for batch in planned.batches for output in self.language_model.run(batch)}
            results = {numbers[key.row]: result for key, result in planned.results(outputs.values()).items()}
            items = case_record(case, numbers, rows, recorder)['items']
            losses, wrong = [], []
            for item in items:
                result = results[item['row']]
                ours = [float(-values.mean()) for values in outputs[result.key].logprobs]
                losses += [abs(a - b) for a, b in zip(ours, item['losses'], strict=True)]
                predicted = result.predicted if 'gold' in item else int(result.predicted is not None)
                if predicted != item['prediction'] or list(result.num_tokens) != item['num_tokens']:
                    wrong.append(item['row'])
            again = self.plan(case, numbers, 'reference')
            off = self.metrics_off(again, again.results(outputs.values()), case)
            yield {'name': case['name'], 'items': len(items), 'loss': max(losses), 'wrong': wrong, 'metrics': off}

    def generated(self) -> Iterator[dict[str, Any]]:
        """Yield the differences of each generation case: texts, scores, metrics."""
        recorder = GenerationRecorder()
        for case, numbers, _ in self.run('generation_cases.yaml', GENERATED, recorder):
            planned = self.plan(case, numbers, 'reference')
            made = [one for batch in planned.continuous_batches for one in self.generator.run(batch)]
            results = planned.results(made)
            wrong = []
            for key, result in results.items():
                item = recorder.items[case['name']][key.row]
                is_normalized = case['task'].get('do_normalization', True)
                answer = normalize_answer(result.answer) if is_normalized else result.answer
                if (digest(answer), result.score) != (item['cleaned'], item['mark']):
                    wrong.append(numbers[key.row])
            off = self.metrics_off(planned, results, case)
            yield {'name': case['name'], 'items': len(results), 'loss': 0.0, 'wrong': wrong, 'metrics': off}

    @staticmethod
    def metrics_off(planned: PlannedEvaluation, results: Any, case: dict[str, Any]) -> float:
        """Return the largest difference from llm-foundry's metrics of a case."""
        (score,) = conclude(planned, results, {}).scores.values()
        metrics = dict(task_values(score))
        return max(abs(metrics[key] - value) for key, value in case['metrics'].items())


def main(data_root: Path, out: Path) -> None:
    found = {}
    for name in MODELS:
        with tempfile.TemporaryDirectory() as folder:
            comparison = Comparison(name, data_root, Path(folder))
            layouts = comparison.layouts()
            found[name] = {'layouts': layouts, 'cases': [*comparison.scored(), *comparison.generated()]}
    out.write_text(json.dumps(found))


if __name__ == '__main__':
    main(Path(sys.argv[1]), Path(sys.argv[2]))
