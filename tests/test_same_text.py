"""Greedy generations of an evaluation compared with transformers' `generate`, one prompt at a time.

Three architectures: rotary positions, ALiBi and learned positions.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import networks
import pytest
import torch
from paths import ROOT
from recorded_cases import encoder, network, prepare

from llmfoundry_gauntlet.config.yaml import read_yaml
from llmfoundry_gauntlet.engine.decoding import PROMPT_STREAM, GenerationDecoder
from llmfoundry_gauntlet.engine.generate import TextGenerator
from llmfoundry_gauntlet.engine.model import CausalLanguageModel
from llmfoundry_gauntlet.engine.probe import probe_generation
from llmfoundry_gauntlet.evaluation.run import PlannedEvaluation, plan_evaluation

LABELS = ('triviaqa_sm_sub', 'agi_eval_sat_math', 'aqua', 'gsm8k', 'svamp')
FOLDERS = {'rotary': 'rotary_bos', 'alibi': 'alibi_pad_eos', 'learned': 'rotary_bos'}
MAX_SEQ_LEN = 2048


def tokenizer(model: str) -> Any:
    return encoder(FOLDERS[model]).tokenizer


@functools.cache
def generator(model: str) -> TextGenerator:
    if model == 'learned':
        sizes = {'vocab_size': len(tokenizer(model)), 'n_positions': MAX_SEQ_LEN, 'bos_token_id': 0, 'eos_token_id': 1}
        made = networks.network('gpt2', seed=3, **sizes)
    else:
        made = network(FOLDERS[model])
    engine = CausalLanguageModel(made, device=torch.device('cpu'))
    found = TextGenerator(engine, GenerationDecoder(tokenizer(model), [tokenizer(model).eos_token_id]))
    found.layout = probe_generation(found, vocabulary=len(tokenizer(model)), longest=300).layout
    assert found.layout == PROMPT_STREAM
    return found


def planned_task(model: str, label: str, folder: Path) -> PlannedEvaluation:
    """Plan a shipped task over its sample data, with generations of a fixed length without stops."""
    tasks = {task['label']: task for task in read_yaml(ROOT / 'yamls/tasks/gauntlet_v0.1.yaml')['icl_tasks']}
    task = {**tasks[label], 'early_stopping_criteria': [], 'generation_kwargs': {'max_new_tokens': 24}}
    lines = (ROOT / 'eval_data' / task['dataset_uri']).read_text(encoding='utf-8').splitlines()
    prepared = prepare(FOLDERS[model], {**task, 'max_seq_len': MAX_SEQ_LEN}, lines, folder)
    return plan_evaluation(prepared, tokens_per_batch=2048)


def check(model: str, planned: PlannedEvaluation) -> None:
    """Check every generation character by character."""
    run = generator(model)
    requests = [request for batch in planned.continuous_batches for request in batch.requests]
    texts = {reply.key: reply.text for batch in planned.continuous_batches for reply in run.run(batch)}
    assert len(texts) == len(planned.items) == len(requests)
    space = '' if len(tokenizer(model)(' a', add_special_tokens=False)['input_ids']) == 1 else ' '
    for request in requests:
        ids = torch.from_numpy(request.context).long()[None]
        written = run.language_model.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=request.max_new_tokens,
            do_sample=False,
            use_cache=True,  # MPT's settings say no, and whole prompts would run at every token
            pad_token_id=0,
            eos_token_id=tokenizer(model).eos_token_id,
        )
        expected = tokenizer(model).decode(written[0, ids.shape[1] :], skip_special_tokens=True)
        assert texts[request.key] == space + expected, request.key


@pytest.mark.parametrize('label', LABELS)
@pytest.mark.parametrize('model', FOLDERS)
def test_sample_data_has_the_text_of_generate(model: str, label: str, tmp_path: Path):
    check(model, planned_task(model, label, tmp_path))
