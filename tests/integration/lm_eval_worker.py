"""Evaluate tasks of lm-eval with GauntletLM, on one rank or on several as lm-eval runs them on several GPUs.

lm_eval_worker.py MODEL TASKS RESULTS. On a CPU lm-eval 0.4.13 has no ranks that share documents (it lets each evaluate
all of them, or fails to load the model), so the model gets those that lm-eval gives it on GPUs. Rank 0 writes the
metrics, and the answers of each document.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import lm_eval
from accelerate import Accelerator
from lm_eval.tasks import TaskManager
from transformers import AutoModelForCausalLM, AutoTokenizer

from llmfoundry_gauntlet.lm_eval import GauntletLM
from llmfoundry_gauntlet.runtime.distributed import destroy_group_at_exit

model, tasks, results = sys.argv[1:]
lm = GauntletLM(pretrained=AutoModelForCausalLM.from_pretrained(model), tokenizer=AutoTokenizer.from_pretrained(model))
if int(os.environ.get('WORLD_SIZE', '1')) > 1:
    lm.accelerator = Accelerator(cpu=True)
    destroy_group_at_exit()
    lm._rank, lm._world_size = lm.accelerator.process_index, lm.accelerator.num_processes

names = sorted(path.stem for path in Path(tasks).glob('*.yaml'))
manager = TaskManager(include_path=tasks, include_defaults=False)
outcome = lm_eval.simple_evaluate(model=lm, tasks=names, task_manager=manager, bootstrap_iters=0)
if outcome is not None:
    answers = {
        name: {str(sample['doc_id']): sample['resps'] for sample in samples}
        for name, samples in outcome['samples'].items()
    }
    written = {'num_ranks': lm.world_size, 'results': outcome['results'], 'answers': answers}
    Path(results).write_text(json.dumps(written, default=str))
