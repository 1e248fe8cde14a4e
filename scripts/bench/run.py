"""Times the same tasks on ours, llm-foundry and lm-eval, one after the other in one process, and prints ratios.

    make bench        (or, in the environment of requirements/reference.txt: python scripts/bench/run.py [options])

The model is a Llama with random weights, made for the run. What is timed is said in `foundry_and_lm_eval.py`; ours is
timed from prompts to scores, tokenisation included. Seconds are processor seconds: the ratios of one run are what
counts. llm-foundry pads every row to `max_seq_len`, so its ratio grows with it.
"""

import argparse
import math
import tempfile
from pathlib import Path
from typing import Any

import torch
from foundry_and_lm_eval import Timing, measure, time_foundry, time_lm_eval
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from llmfoundry_gauntlet.config.settings import decode_settings
from llmfoundry_gauntlet.config.yaml_files import read_yaml
from llmfoundry_gauntlet.data.files import locate
from llmfoundry_gauntlet.engine.language_model import CausalLanguageModel, default_tokens_per_batch
from llmfoundry_gauntlet.evaluation import EvaluationData, conclude, load_data, plan_evaluation
from llmfoundry_gauntlet.prompts.encode import Encoder

TOKENIZER = Path('tests/fixtures/models/rotary_bos')
TASKS = (
    'copa',
    'openbook_qa',
    'piqa',
    'hellaswag',
    'arc_challenge',
    'commonsense_qa',
    'lambada_openai',
    'coqa',
    'squad',
    'bigbench_dyck_languages',
    'winograd',
    'winogrande',
)


def make_model(folder: Path, *, width: int, layers: int, max_seq_len: int) -> None:
    """Saves a Llama with random weights and the fixtures' tokenizer."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 32,
        max_position_embeddings=max_seq_len,
        initializer_range=0.2,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def time_ours(data: EvaluationData, model_folder: Path, *, max_seq_len: int) -> Timing:
    """Our evaluation of one task, after a warm-up."""
    device = torch.device('cpu')
    encoder = Encoder(AutoTokenizer.from_pretrained(model_folder))
    language_model = CausalLanguageModel(AutoModelForCausalLM.from_pretrained(model_folder).eval(), device=device)

    def evaluate() -> list[int]:
        planned = plan_evaluation(
            data, encoder, max_seq_len=max_seq_len, tokens_per_batch=default_tokens_per_batch(device.type)
        )
        outputs = [output for batch in planned.batches for output in language_model.run(batch)]
        (results,) = conclude(planned, planned.results(outputs), {}).results.values()
        choices = planned.items[results[0].key].request.continuations
        return [int(r.predicted is not None) if len(choices) == 1 else r.predicted for r in results]

    evaluate()
    wall, cpu, predictions = measure(evaluate, 'cpu')
    return Timing(wall, cpu, predictions)


def task_line(entry: dict[str, Any], options: argparse.Namespace, model_folder: Path, rows_file: Path) -> list[float]:
    """Times one task three times, prints its line, and returns both ratios."""
    entry = {**entry, 'dataset_uri': str(rows_file), 'has_categories': False}
    data = load_data(decode_settings({'tasks': [entry], 'truncation': 'reference'}))
    sizes = {'max_seq_len': options.max_seq_len}
    ours = time_ours(data, model_folder, **sizes)
    foundry = time_foundry(entry, rows_file, model_folder, batch_size=options.batch_size, **sizes)
    lm_eval = time_lm_eval(entry, rows_file, model_folder, batch_size=options.batch_size, **sizes)
    items = len(ours.predictions)
    ratios = [foundry.cpu_seconds / ours.cpu_seconds, lm_eval.cpu_seconds / ours.cpu_seconds]
    same = sum(a == b for a, b in zip(ours.predictions, foundry.predictions, strict=True))
    name = f'{entry["label"]}/{entry["num_fewshot"][0]}-shot'
    times = ''.join(f'{timing.cpu_seconds / items:>12.4f}' for timing in (ours, foundry, lm_eval))
    print(f'{name:<34}{times}{ratios[0]:>15.1f}{ratios[1]:>15.2f}{f"{same}/{items}":>10}', flush=True)
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--data-root', default='eval_data', help='folder with the task files')
    parser.add_argument('--max-rows', type=int, default=16, help='first rows of each file')
    parser.add_argument('--max-seq-len', type=int, default=1024)
    parser.add_argument('--batch-size', type=int, default=8, help='of llm-foundry and lm-eval')
    parser.add_argument('--width', type=int, default=256)
    parser.add_argument('--layers', type=int, default=4)
    parser.add_argument('--threads', type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    entries = {entry['label']: entry for entry in read_yaml('yamls/tasks/gauntlet_v0.1.yaml')['icl_tasks']}
    print(
        f'processor seconds per item; Llama of {options.layers} layers, width {options.width}, fp32, max_seq_len '
        f'{options.max_seq_len}, batches of {options.batch_size} elsewhere, {options.threads} thread(s)'
    )
    heads = ('ours', 'llm-foundry', 'lm-eval')
    print(
        f'{"":<34}' + ''.join(f'{head:>12}' for head in heads) + f'{"foundry/ours":>15}{"lm-eval/ours":>15}{"same":>10}'
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder / 'model', width=options.width, layers=options.layers, max_seq_len=options.max_seq_len)
        all_ratios = []
        for label in TASKS:
            lines = locate(entries[label]['dataset_uri'], options.data_root).read_text(encoding='utf-8').splitlines()
            rows_file = folder / f'{label}.jsonl'
            rows_file.write_text('\n'.join(lines[: options.max_rows]) + '\n', encoding='utf-8')
            all_ratios.append(task_line(entries[label], options, folder / 'model', rows_file))
    means = [math.exp(sum(map(math.log, column)) / len(column)) for column in zip(*all_ratios, strict=True)]
    print(f'{"geometric mean":<34}{"":>36}{means[0]:>15.1f}{means[1]:>15.2f}')
    print(f'least{"":<65}{min(r[0] for r in all_ratios):>15.1f}{min(r[1] for r in all_ratios):>15.2f}')


if __name__ == '__main__':
    main()
