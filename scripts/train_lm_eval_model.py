"""Train the model of tests/test_lm_eval_equality.py: `python scripts/train_lm_eval_model.py FOLDER`.

It knows the forms of a few tasks, names and numbers, so that its generations have answers, right and wrong ones, stop
strings and ends. The folder of the tests is tests/fixtures/models/sums; another machine's rounding makes other weights.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 400
TOKENS_PER_ROW = 512
ROWS_PER_STEP = 2
NUM_STEPS = 900
BEGIN, END, PADDING, THOUGHT = '<s>', '</s>', '<pad>', '</think>'
NAMES = ['Tom', 'Eve', 'Bob', 'Mia', 'Ann', 'Leo', 'Zoe', 'Kim', 'Jan']
# A total for each thing, as so small a model does not learn to add.
TOTALS = {'pens': 7, 'cups': 13, 'hats': 11, 'nuts': 12, 'books': 5}
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}"
    '{% if not (loop.last and continue_final_message) %}\n{% endif %}{% endfor %}'
    '{% if add_generation_prompt %}<|assistant|>{% endif %}'
)


def documents() -> Iterator[str]:
    """Yield questions with answers, in the forms of GSM8K, its chain of thought, a chat and MATH."""
    draw = random.Random(0)
    for number in range(1600):
        name = draw.choice(NAMES)
        thing, total = draw.choice([*TOTALS.items()])
        first = draw.randint(1, total - 1)
        question = f'{name} has {first} {thing} and gets {total - first} more. How many {thing} has {name} now?'
        solution = f'{name} has {first} + {total - first} = {total} {thing}.'
        forms = [
            f'Question: {question}\nAnswer: {solution}\n#### {total}\n\n',
            f'Q: {question}\nA: {solution} The answer is {total}.\n\n',
            f'<|user|>{question}\n<|assistant|>{solution} {THOUGHT} The best answer is {total}.{END}',
            f'Problem:\n{question}\n\nSolution: {solution} Final Answer: The final answer is ${total}$.\n\n',
        ]
        yield forms[number // 12 % len(forms)]  # a form keeps on for a few questions, as shots do


def trained_tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level BPE of a few words, with a chat template that writes the beginning token."""
    tokens = Tokenizer(models.BPE())
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[BEGIN, END, PADDING, THOUGHT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokens.train_from_iterator(documents(), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokens,
        bos_token=BEGIN,
        eos_token=END,
        pad_token=PADDING,
        clean_up_tokenization_spaces=False,
        model_input_names=['input_ids', 'attention_mask'],
        chat_template=CHAT_TEMPLATE,
    )


def trained_network(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Return a Llama of two layers that was trained on the documents."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=2048,
        initializer_range=0.1,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    network = LlamaForCausalLM(config)
    ids = tokenizer.encode(''.join(documents()), add_special_tokens=False)
    num_rows = len(ids) // TOKENS_PER_ROW
    rows = torch.tensor(ids[: num_rows * TOKENS_PER_ROW]).view(num_rows, TOKENS_PER_ROW)
    optimizer = torch.optim.AdamW(network.parameters(), lr=5e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.02, total_iters=NUM_STEPS)
    for step in range(NUM_STEPS):
        first = step * ROWS_PER_STEP % (num_rows - ROWS_PER_STEP)
        batch = rows[first : first + ROWS_PER_STEP]
        network(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return network


if __name__ == '__main__':
    tokenizer = trained_tokenizer()
    trained_network(tokenizer).to(torch.bfloat16).save_pretrained(sys.argv[1])
    tokenizer.save_pretrained(sys.argv[1])
