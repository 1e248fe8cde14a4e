"""Make the two tiny language models, with tokenizers, that the parity tests score, and a third tokenizer.

    python scripts/make_fixture_models.py [--text-root eval_data] [--out tests/fixtures/models] [--models NAME ...]

`rotary_bos` is a Llama with a byte-level BPE tokenizer that adds a bos token, has a pad token of its own and knows " a"
as one token. `alibi_pad_eos` is an MPT whose tokenizer adds nothing, pads with its eos token and keeps every space as a
token of its own. Both see nothing but this sample data (`eval_data/**/*.jsonl`) and generated arithmetic and
brackets. `unigram_characters` is a tokenizer alone, like those of SentencePiece: a unigram model in which every ASCII
character is a token, with a bos token.

One thread and fixed seeds: a second run over the same text writes the same bytes on the same machine. `SOURCES.json`
names the text by its digest. Needs torch, transformers, tokenizers and safetensors; takes some four minutes on an
idle core.
"""

import argparse
import hashlib
import json
import random
import shutil
import string
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, MptConfig, MptForCausalLM, PreTrainedTokenizerFast
from transformers.modeling_utils import PreTrainedModel

REPOSITORY = Path(__file__).resolve().parent.parent
MAX_SEQ_LEN = 2048
SEED = 20240
NUM_DOCUMENTS = 6000
CROP_LENGTH = 512
BATCH_SIZE = 8
NUM_STEPS = 700
LEARNING_RATE = 4e-3
# llm-foundry strips the context and adds no space before an answer where " a" is not one token.
DELIMITERS = {'rotary_bos': (' ', ' ', '\nAnswer: '), 'alibi_pad_eos': ('', '', '', '\nAnswer:', ' ')}
UNIGRAM = 'unigram_characters'
BRACKETS = {'(': ')', '[': ']', '{': '}', '<': '>'}


def read_rows(text_root: Path) -> dict[str, list[dict[str, Any]]]:
    """Rows per file, in the order of the file names relative to text_root."""
    paths = sorted(text_root.rglob('*.jsonl'), key=lambda path: path.relative_to(text_root).as_posix())
    return {
        path.relative_to(text_root).as_posix(): [
            json.loads(line) for line in path.read_text('utf-8').split('\n') if line
        ]
        for path in paths
    }


def render_row(row: dict[str, Any], delimiter: str) -> str:
    """The row as a few-shot prompt shows it: question, delimiter, right answer. Empty for other kinds of rows."""
    if 'context_options' in row:
        return f'{row["context_options"][row["gold"]].rstrip()}{delimiter}{row["continuation"].strip()}'
    if 'choices' in row:
        return f'{row["query"].rstrip()}{delimiter}{row["choices"][row["gold"]].strip()}'
    if 'context' in row and 'continuation' in row:
        return f'{row["context"].rstrip()}{delimiter}{row["continuation"].strip()}'
    if 'context' in row and 'answer' in row:
        return f'{row["context"].rstrip()}{delimiter}{row["answer"].strip()}'
    return ''


def arithmetic_row(rng: random.Random) -> dict[str, str]:
    """One sum or difference of numbers below 20, with or without spaces."""
    left, right, gap, sign = rng.randrange(20), rng.randrange(20), rng.choice(['', ' ']), rng.choice('+-')
    value = left + right if sign == '+' else left - right
    return {'context': f'{left}{gap}{sign}{gap}{right}{gap}=', 'continuation': str(value)}


def bracket_row(rng: random.Random) -> dict[str, str]:
    """A balanced sequence of brackets, cut where `Output:` asks for its end."""
    opened = [rng.choice(list(BRACKETS))]
    written = [opened[0]]
    for _ in range(rng.randrange(4, 24)):
        if len(opened) > 1 and rng.random() < 0.45:
            written.append(BRACKETS[opened.pop()])
        else:
            opened.append(rng.choice(list(BRACKETS)))
            written.append(opened[-1])
    closing = ' '.join(BRACKETS[bracket] for bracket in reversed(opened[-3:]))
    lead = ' '.join(BRACKETS[bracket] for bracket in reversed(opened[:-3]))
    return {'context': f'Input: {" ".join(written)}\nOutput: {lead}', 'continuation': closing}


def make_documents(
    files: dict[str, list[dict[str, Any]]], rng: random.Random, delimiters: Sequence[str]
) -> Iterator[str]:
    """Few-shot texts: some rows of one kind each, joined as the tasks join them."""
    usable = {name: [row for row in rows if render_row(row, ' ')] for name, rows in files.items()}
    names = [name for name, rows in usable.items() if rows]
    for _ in range(NUM_DOCUMENTS):
        kind = rng.random()
        if kind < 0.1:
            rows: list[dict[str, Any]] = [arithmetic_row(rng) for _ in range(rng.randrange(4, 24))]
        elif kind < 0.3:
            rows = [bracket_row(rng) for _ in range(rng.randrange(2, 10))]
        else:
            candidates = usable[rng.choice(names)]
            rows = rng.sample(candidates, min(len(candidates), rng.randrange(1, 12)))
        yield rng.choice(['\n', '\n', '\n\n']).join(render_row(row, rng.choice(delimiters)) for row in rows)


def train_bpe(documents: list[str], vocab_size: int, special_tokens: list[str], splits_spaces: bool) -> Tokenizer:
    """A byte-level BPE tokenizer. Every byte is an entry of its own, so any text can be encoded."""
    tokenizer = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if splits_spaces:
        lone_spaces = pre_tokenizers.Split(Regex(' '), behavior='isolated')
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([lone_spaces, byte_level])
    else:
        tokenizer.pre_tokenizer = byte_level
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special_tokens,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def make_bos_tokenizer(documents: list[str]) -> PreTrainedTokenizerFast:
    tokenizer = train_bpe(documents, 900, ['<s>', '</s>', '<pad>'], splits_spaces=False)
    tokenizer.post_processor = processors.TemplateProcessing(
        single='<s> $A', pair='<s> $A <s> $B', special_tokens=[('<s>', tokenizer.token_to_id('<s>'))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token='<s>',
        eos_token='</s>',
        pad_token='<pad>',
        model_max_length=MAX_SEQ_LEN,
        clean_up_tokenization_spaces=False,
    )


def make_pad_eos_tokenizer(documents: list[str]) -> PreTrainedTokenizerFast:
    tokenizer = train_bpe(documents, 800, ['<|endoftext|>'], splits_spaces=True)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token='<|endoftext|>',
        pad_token='<|endoftext|>',
        model_max_length=MAX_SEQ_LEN,
        clean_up_tokenization_spaces=False,
    )


def make_unigram_tokenizer() -> PreTrainedTokenizerFast:
    special = ['<unk>', '<s>', '</s>', '<pad>']
    characters = ['\u2581', *string.digits, *string.ascii_letters, *string.punctuation, '\n']
    vocabulary = [(token, 0.0) for token in special] + [
        (token, -2 - rank / 50) for rank, token in enumerate(characters)
    ]
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(single='<s> $A', special_tokens=[('<s>', 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token='<unk>',
        bos_token='<s>',
        eos_token='</s>',
        pad_token='<pad>',
        model_max_length=MAX_SEQ_LEN,
        clean_up_tokenization_spaces=False,
    )


def make_rotary_model(tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=160,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=MAX_SEQ_LEN,
            tie_word_embeddings=False,
            initializer_range=0.05,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def make_alibi_model(tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    return MptForCausalLM(
        MptConfig(
            vocab_size=len(tokenizer),
            d_model=64,
            n_heads=4,
            n_layers=2,
            expansion_ratio=4,
            max_seq_len=MAX_SEQ_LEN,
            initializer_range=0.05,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def train(model: PreTrainedModel, stream: torch.Tensor) -> float:
    """Fit the model to random crops of one long row of tokens; returns the mean loss of the last 50 steps, in nats."""
    generator = torch.Generator().manual_seed(SEED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, NUM_STEPS, pct_start=0.05)
    losses = []
    model.train()
    for _ in range(NUM_STEPS):
        starts = torch.randint(len(stream) - CROP_LENGTH, (BATCH_SIZE,), generator=generator).tolist()
        crops = torch.stack([stream[start : start + CROP_LENGTH] for start in starts])
        logits = model(input_ids=crops, use_cache=False).logits
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), crops[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    model.eval()
    return sum(losses[-50:]) / 50


def make_fixture_model(
    documents: list[str],
    out: Path,
    make_tokenizer: Callable[[list[str]], PreTrainedTokenizerFast],
    make_model: Callable[[PreTrainedTokenizerFast], PreTrainedModel],
) -> None:
    """Train and save one model. Each document is followed by eos, and starts with bos where the tokenizer adds it."""
    started = time.monotonic()
    tokenizer = make_tokenizer(documents)
    ids = [token for document in documents for token in [*tokenizer(document)['input_ids'], tokenizer.eos_token_id]]
    torch.manual_seed(SEED)
    model = make_model(tokenizer)
    loss = train(model, torch.tensor(ids))
    if out.exists():
        shutil.rmtree(out)
    model.save_pretrained(out, safe_serialization=True)
    (out / 'model.safetensors').chmod(0o644)
    tokenizer.save_pretrained(out)
    size = sum(path.stat().st_size for path in out.iterdir())
    assert size < 1_000_000, f'{out.name} takes {size} bytes, 999,999 at most may be kept'
    print(
        f'{out.name}: {model.num_parameters()} parameters, {len(tokenizer)} tokens, {size} bytes, loss {loss:.3f}, '
        f"' a' is {len(tokenizer(' a', add_special_tokens=False)['input_ids'])} token(s), "
        f'{time.monotonic() - started:.0f} s'
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--text-root', type=Path, default=REPOSITORY / 'eval_data')
    parser.add_argument('--out', type=Path, default=REPOSITORY / 'tests' / 'fixtures' / 'models')
    recipes = {
        'rotary_bos': (make_bos_tokenizer, make_rotary_model),
        'alibi_pad_eos': (make_pad_eos_tokenizer, make_alibi_model),
    }
    names = [*sorted(recipes), UNIGRAM]
    parser.add_argument('--models', nargs='*', choices=names, default=names)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    options.out.mkdir(parents=True, exist_ok=True)
    if UNIGRAM in options.models:
        make_unigram_tokenizer().save_pretrained(options.out / UNIGRAM)
    if trained := [name for name in options.models if name in recipes]:
        make_models(trained, recipes, options.text_root, options.out)


def make_models(names: list[str], recipes: dict[str, Any], text_root: Path, out: Path) -> None:
    """Make the models of these names, and the file that says what text they saw."""
    files = read_rows(text_root)
    text = json.dumps(files, sort_keys=True).encode()
    sources = {
        'files': {name: len(rows) for name, rows in files.items()},
        'text_sha256': hashlib.sha256(text).hexdigest(),
    }
    (out / 'SOURCES.json').write_text(json.dumps(sources, indent=1) + '\n', 'utf-8')
    for name in names:
        documents = list(make_documents(files, random.Random(SEED), DELIMITERS[name]))
        make_fixture_model(documents, out / name, *recipes[name])


if __name__ == '__main__':
    main()
