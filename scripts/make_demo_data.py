"""Write the demo's tokenizer and training text, the same bytes every time; existing ones are kept.

    python scripts/make_demo_data.py [--out runs/demo/data] [--eval-data eval_data]

The tokenizer is a byte-level BPE, so any text can be encoded. Digits, brackets, other signs and single letters are one
token each, with or without a space before them, and merges never cross a sign or a line end: a text has the same tokens
whole and split before a space or a line end, as few-shot prompts are. No special token is added.
"""

import argparse
import json
import os
import string
from collections.abc import Iterator
from pathlib import Path

from demo_data import training_documents
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from llmfoundry_gauntlet.data.stores import write_atomically

VOCABULARY_SIZE = 768
MAX_TOKENIZER_FILE_BYTES = 200_000  # of each file of eval_data, so that no task dominates the merges
END_OF_TEXT, PADDING = '<|endoftext|>', '<|padding|>'
WORDS_AND_SIGNS = r' ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]|\s'
ONE_TOKEN_EACH = string.ascii_letters + string.digits + string.punctuation


def evaluation_texts(folder: Path) -> Iterator[str]:
    """Yield all strings of the evaluation rows, file by file in the order of their names."""
    for path in sorted(folder.rglob('*.jsonl')):
        with path.open(encoding='utf-8') as lines:
            for line in lines.readlines(MAX_TOKENIZER_FILE_BYTES):
                yield from strings(json.loads(line))


def strings(value: object) -> Iterator[str]:
    """Yield the strings in a JSON value, without the keys of mappings."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from strings(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from strings(inner)


def tokenizer_texts(documents: list[str], eval_data: Path) -> Iterator[str]:
    """Yield the text to learn merges from; signs after a space are so frequent that they are merged first."""
    yield from (f' {sign}' * 100_000 for sign in ONE_TOKEN_EACH)
    yield from documents[:500]
    yield from evaluation_texts(eval_data)


def build_tokenizer(texts: Iterator[str]) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE of `VOCABULARY_SIZE` entries, learnt from the texts."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS_AND_SIGNS), behavior='isolated'),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=[END_OF_TEXT, PADDING],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token=END_OF_TEXT, pad_token=PADDING, clean_up_tokenization_spaces=False
    )


def make_demo_data(*, out: Path, eval_data: Path) -> list[Path]:
    """Make missing files under `out`; return the paths written. A killed run leaves no partial ones."""
    text_path, tokenizer_folder = out / 'train.jsonl', out / 'tokenizer'
    missing = [path for path in (text_path, tokenizer_folder) if not path.exists()]
    if missing:
        documents = list(training_documents())
    if text_path in missing:
        write_atomically(text_path, (f'{json.dumps({"text": text})}\n'.encode() for text in documents))
    if tokenizer_folder in missing:
        unfinished = out / 'tokenizer.unfinished'
        build_tokenizer(tokenizer_texts(documents, eval_data)).save_pretrained(unfinished)
        os.replace(unfinished, tokenizer_folder)
    return missing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--out', type=Path, default=Path('runs/demo/data'))
    parser.add_argument('--eval-data', type=Path, default=Path('eval_data'))
    arguments = parser.parse_args()
    written = make_demo_data(out=arguments.out, eval_data=arguments.eval_data)
    print('\n'.join(f'wrote {path}' for path in written) or f'{arguments.out}: all there')


if __name__ == '__main__':
    main()
