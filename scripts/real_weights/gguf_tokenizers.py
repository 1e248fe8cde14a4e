"""The tokenizers of two GGUF files.

transformers 4.53.3 converts both wrongly: SmolLM2's begins every text with `<|im_start|>` and takes it for the end of
one, and Gemma's becomes a Unigram model, though its pieces are those of a byte-pair encoding. (5.24 has the right ids
of the texts that were tried.)

Here each is built from the pieces, kinds and merges or scores in the file, by the rules of the library that trained it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

SPACE = '▁'  # sentencepiece's mark for a space


class Kind(IntEnum):
    """The kind of a piece, as GGUF files have it in `tokenizer.ggml.token_type`."""

    NORMAL = 1
    CONTROL = 3  # such as the end of a text
    USER_DEFINED = 4  # never split, such as a run of spaces or a tag of HTML


@dataclass(frozen=True, slots=True)
class Piece:
    """An entry of a vocabulary; its place is its id."""

    text: str
    kind: int
    score: float = 0.0


def byte_level_tokenizer(pieces: Sequence[Piece], merges: Sequence[str]) -> Tokenizer:
    """Return the byte-level BPE of SmolLM2, which takes each digit by itself."""
    vocabulary = {piece.text: index for index, piece in enumerate(pieces)}
    pairs = [(left, right) for left, right in (merge.split(' ') for merge in merges)]
    tokenizer = Tokenizer(BPE(vocabulary, pairs))

    single_digits = pre_tokenizers.Digits(individual_digits=True)
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([single_digits, words])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(added_tokens(pieces, Kind.CONTROL))
    return tokenizer


def sentencepiece_tokenizer(pieces: Sequence[Piece], beginning: str) -> Tokenizer:
    """Return the BPE of Gemma, which begins texts with a token and has bytes for what it does not know."""
    # GGUF files write the spaces of pieces that are never split as spaces.
    marked = [replace(piece, text=piece.text.replace(' ', SPACE)) for piece in pieces]
    vocabulary = {piece.text: index for index, piece in enumerate(marked)}

    pairs = merges_of_scores(marked, vocabulary)
    tokenizer = Tokenizer(BPE(vocabulary, pairs, unk_token='<unk>', fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(' ', SPACE)
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, ' '), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f'{beginning} $A', special_tokens=[(beginning, vocabulary[beginning])]
    )
    tokenizer.add_special_tokens(added_tokens(marked, Kind.CONTROL))
    tokenizer.add_tokens(added_tokens(marked, Kind.USER_DEFINED))
    return tokenizer


def merges_of_scores(pieces: Sequence[Piece], vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """Return every pair of pieces that makes a third, first those of the third with the highest score.

    sentencepiece joins the two neighbours whose joint piece has the highest score, however that piece came about, so
    each piece is the result of all its cuts into two. Runs of spaces are joined first: they are one piece wherever they
    stand, but as texts are searched for such pieces before spaces are marked, merges must find them.
    """
    merges: list[tuple[float, str, str]] = []
    for piece in pieces:
        is_run_of_spaces = piece.kind == Kind.USER_DEFINED and set(piece.text) == {SPACE}
        if piece.kind != Kind.NORMAL and not is_run_of_spaces:
            continue
        score = 0.0 if is_run_of_spaces else piece.score
        cuts = [(piece.text[:place], piece.text[place:]) for place in range(1, len(piece.text))]
        possible = [(left, right) for left, right in cuts if left in vocabulary and right in vocabulary]
        possible.sort(key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
        merges += [(score, left, right) for left, right in possible]

    merges.sort(key=lambda merge: -merge[0])  # a stable sort: of equal scores, the smaller id comes first
    return [(left, right) for _score, left, right in merges]


def added_tokens(pieces: Sequence[Piece], kind: Kind) -> list[AddedToken]:
    """Return the pieces of a kind as tokens that are found in a text before it is split."""
    is_special = kind == Kind.CONTROL
    return [AddedToken(piece.text, normalized=False, special=is_special) for piece in pieces if piece.kind == kind]


def pieces_of(fields: dict[str, Any]) -> list[Piece]:
    """Return the vocabulary in the fields of a GGUF file."""
    texts, kinds = fields['tokenizer.ggml.tokens'], fields['tokenizer.ggml.token_type']
    scores = fields.get('tokenizer.ggml.scores', [0.0] * len(texts))
    return [Piece(text, int(kind), float(score)) for text, kind, score in zip(texts, kinds, scores, strict=True)]


def tokenizer_of(fields: dict[str, Any], model_max_length: int) -> PreTrainedTokenizerFast:
    """Return the tokenizer in the fields of a GGUF file, of one of the two kinds that are built here."""
    pieces = pieces_of(fields)
    special = {
        name: pieces[fields[f'tokenizer.ggml.{key}_token_id']].text
        for name, key in (('bos', 'bos'), ('eos', 'eos'), ('unk', 'unknown'), ('pad', 'padding'))
    }
    model = fields['tokenizer.ggml.model']
    if model == 'gpt2':
        tokenizer = byte_level_tokenizer(pieces, fields['tokenizer.ggml.merges'])
    elif model == 'llama':
        tokenizer = sentencepiece_tokenizer(pieces, special['bos'])
    else:
        raise ValueError(f'tokenizer.ggml.model is {model!r}; known here: gpt2 (byte-level), llama (sentencepiece)')

    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=special['bos'],
        eos_token=special['eos'],
        unk_token=special['unk'],
        pad_token=special['pad'],
        clean_up_tokenization_spaces=False,
        model_max_length=model_max_length,
    )
    wrapped.chat_template = fields.get('tokenizer.chat_template')
    return wrapped


def check_round_trips(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> None:
    """Raise ValueError for a text that is not the same after it was tokenized and decoded."""
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False).input_ids
        decoded = tokenizer.decode(ids)
        if decoded != text:
            raise ValueError(f'the tokenizer makes {decoded!r} of {text!r}')
