"""Token ids of prompts, and what identifies a tokenizer."""

import json

import numpy as np
import pytest
import transformers
from character_tokenizer import CharacterTokenizer
from paths import FIXTURES
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerFast

from llmfoundry_gauntlet.errors import ModelError
from llmfoundry_gauntlet.tasks.encode import Encoder
from llmfoundry_gauntlet.types import Prompt

FOLDER = FIXTURES / 'models' / 'rotary_bos'


def fast(name: str = 'rotary_bos', **changes):
    return AutoTokenizer.from_pretrained(FIXTURES / 'models' / name, **changes)


def text_of(ids: np.ndarray) -> str:
    return ''.join('^' if i == 1 else chr(i) for i in ids)


def ids_of(encoder: Encoder, *texts: str, special: bool = False) -> list[list[int]]:
    found = encoder.encode(list(texts), special=special)
    return [found[text].tolist() for text in texts]


@pytest.mark.parametrize('prefix_space', [False, True])
def test_parts_are_tokenized_separately_and_only_the_first_gets_special_tokens(character_tokenizer, prefix_space: bool):
    """Continuations get a space if the tokenizer merges it."""
    encoder = Encoder(character_tokenizer)
    assert not encoder.prefix_space  # ' a' is two tokens
    encoder.prefix_space = prefix_space
    (parts,) = encoder.prompts([Prompt(preamble='shots', contexts=('query',), continuations=('x', ' yz'))])
    assert text_of(parts.preamble) == '^shots'
    assert [text_of(ids) for ids in parts.contexts] == ['query']
    assert [text_of(ids) for ids in parts.continuations] == [' x' if prefix_space else 'x', ' yz']
    assert {ids.dtype for ids in (parts.preamble, *parts.contexts, *parts.continuations)} == {np.dtype(np.int32)}


@pytest.mark.parametrize(('eos', 'text', 'expected'), [('!', 'a!', '^a'), ('\1', '', '^'), ('b', 'a!', '^a!')])
def test_a_trailing_eos_of_the_preamble_is_dropped_unless_it_is_alone(character_tokenizer, eos, text, expected):
    encoder = Encoder(character_tokenizer)
    encoder.eos_token_id = ord(eos)
    assert text_of(encoder.preambles([text])[text]) == expected


def test_a_tokenizer_that_cannot_encode_is_a_model_error():
    words = Tokenizer(models.WordLevel({' a': 0, 'yes': 1, 'no': 2}, unk_token='?'))
    encoder = Encoder(PreTrainedTokenizerFast(tokenizer_object=words))
    assert ids_of(encoder, 'yes', 'no') == [[1], [2]]
    with pytest.raises(ModelError, match="'maybe'"):
        encoder.encode(['yes', 'no', 'maybe'], special=False)


def test_earlier_truncation_and_padding_change_nothing():
    tokenizer, texts = fast(), ['one two three', '<s>a</s>', ' \n\n']
    expected = tokenizer(texts)['input_ids']
    tokenizer(texts, truncation=True, max_length=2, padding='max_length')
    assert ids_of(Encoder(tokenizer), *texts, special=True) == expected


def test_slow_tokenizers_give_their_own_ids():
    encoder = Encoder(ByT5Tokenizer())  # a byte b is the id b + 3
    assert ids_of(encoder, 'ab', ' ') == [[100, 101], [35]]
    assert encoder.preambles(['a'])['a'].tolist() == [100]  # without the eos that it adds


def test_a_word_has_one_space_before_it_with_any_tokenizer():
    """Some tokenizers split a space off (it would be duplicated), some add it to every first token, some do neither."""
    metaspace = Tokenizer(models.WordLevel({'▁': 0, '▁a': 1, '▁A': 2, '<unk>': 3}, unk_token='<unk>'))
    metaspace.pre_tokenizer = pre_tokenizers.Metaspace()
    metaspace.decoder = decoders.Metaspace()
    encoder = Encoder(PreTrainedTokenizerFast(tokenizer_object=metaspace, unk_token='<unk>'))
    assert encoder.adds_space and encoder.word_after(' A') == 'A'
    assert ids_of(encoder, 'A', ' A')[0] == [2]
    characters = Encoder(CharacterTokenizer())
    assert not characters.adds_space and characters.word_after(' A') == characters.word_after('A') == ' A'


# Fingerprints and names.


def llama(**changes):
    """Return the class that most Llama models name."""
    return transformers.LlamaTokenizerFast.from_pretrained(FOLDER, **changes)


def fingerprint(tokenizer) -> str | None:
    return Encoder(tokenizer).fingerprint


def changed(tokenizer, **settings):
    for name, value in settings.items():
        setattr(tokenizer, name, value)
    return tokenizer


def added(tokenizer):
    tokenizer.add_tokens(['squad'])
    return tokenizer


def without_merge(tokenizer, folder):
    """Remove the last merge: the vocabulary is the same, the ids are not."""
    tokenizer.save_pretrained(folder)
    content = json.loads((folder / 'tokenizer.json').read_text())
    content['model']['merges'].pop()
    (folder / 'tokenizer.json').write_text(json.dumps(content))
    return AutoTokenizer.from_pretrained(folder)


def test_fingerprint_and_name_do_not_depend_on_folder_or_use(tmp_path, character_tokenizer):
    tokenizer = fast()
    tokenizer.save_pretrained(tmp_path)
    expected, name = fingerprint(tokenizer), Encoder(tokenizer).name
    assert expected is not None and name.startswith('PreTrainedTokenizerFast 900 (')
    copied = AutoTokenizer.from_pretrained(tmp_path)
    assert (fingerprint(copied), Encoder(copied).name) == (expected, name)
    tokenizer(['one two three', 'four'], truncation=True, max_length=2, padding='max_length')
    assert (fingerprint(tokenizer), Encoder(tokenizer).name) == (expected, name)
    changed(tokenizer, padding_side='left', model_max_length=7, chat_template='{{ messages }}')
    assert fingerprint(tokenizer) == expected
    assert fingerprint(character_tokenizer) is None  # a class about which nothing is known


def test_names_differ_by_vocabulary_and_chat_template(tmp_path):
    others = (added(fast()), without_merge(fast(), tmp_path), changed(fast(), chat_template='{{ messages }}'))
    assert len({Encoder(tokenizer).name for tokenizer in (fast(), *others)}) == 4


def test_what_changes_the_ids_of_a_fast_tokenizer_changes_its_fingerprint(tmp_path):
    tokenizers = [
        fast(),
        added(fast()),
        changed(fast(), split_special_tokens=True),
        changed(fast(), eos_token='<pad>'),
        without_merge(fast(), tmp_path),
        llama(),
        changed(llama(), add_bos_token=False),
        llama(add_eos_token=True),
        fast('alibi_pad_eos'),
    ]
    assert len({fingerprint(tokenizer) for tokenizer in tokenizers}) == len(tokenizers)
    assert fingerprint(changed(tokenizers[6], add_bos_token=True)) == fingerprint(tokenizers[5])


def slow(folder, *, merges=('a b', 'ab c'), **changes):
    """Return GPT-2's tokenizer in Python, whose merges are in no vocabulary."""
    folder.mkdir(exist_ok=True)
    words = ['a', 'b', 'c', 'ab', 'abc', 'bc', '<|endoftext|>']
    (folder / 'vocab.json').write_text(json.dumps({word: index for index, word in enumerate(words)}))
    (folder / 'merges.txt').write_text('#version: 0.2\n' + '\n'.join(merges) + '\n')
    return transformers.GPT2Tokenizer(str(folder / 'vocab.json'), str(folder / 'merges.txt'), **changes)


def test_what_changes_the_ids_of_a_slow_tokenizer_changes_its_fingerprint(tmp_path):
    used = slow(tmp_path / 'a')
    expected = fingerprint(used)
    used('abc')
    assert expected is not None and fingerprint(used) == fingerprint(slow(tmp_path / 'b')) == expected
    tokenizers = [
        slow(tmp_path / 'c', merges=('b c', 'a bc')),
        slow(tmp_path / 'a', add_bos_token=True),
        slow(tmp_path / 'a', errors='strict'),
        added(slow(tmp_path / 'a')),
        ByT5Tokenizer(),
        ByT5Tokenizer(extra_ids=10),
    ]
    assert len({expected, *map(fingerprint, tokenizers)} - {None}) == len(tokenizers) + 1


def test_custom_tokenizer_classes_differ_by_their_source(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    found = []
    for name, text in (('own_a', 'x'), ('own_b', 'y')):
        source = f'from transformers import PreTrainedTokenizerFast as Fast\nclass Own(Fast):\n    NOTE = "{text}"\n'
        (tmp_path / f'{name}.py').write_text(source)
        kind = __import__(name).Own
        kind.__module__ = 'own'
        monkeypatch.setitem(__import__('sys').modules, 'own', __import__(name))
        found.append(fingerprint(kind.from_pretrained(FOLDER)))
    assert None not in found and len(set(found)) == 2
