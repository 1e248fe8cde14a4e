import json

import pytest
from paths import FIXTURES

from llmfoundry_gauntlet.tasks.encode import Encoder

transformers = pytest.importorskip('transformers')

FOLDER = FIXTURES / 'models' / 'rotary_bos'


def fast(**changes):
    return transformers.AutoTokenizer.from_pretrained(FOLDER, **changes)


def llama(**changes):
    """The class that most Llama models name."""
    return transformers.LlamaTokenizerFast.from_pretrained(FOLDER, **changes)


def fingerprint(tokenizer) -> str | None:
    return Encoder(tokenizer).fingerprint


def test_the_same_tokenizer_from_another_folder_and_after_use_has_the_same_fingerprint(tmp_path):
    tokenizer = fast()
    tokenizer.save_pretrained(tmp_path)
    expected = fingerprint(tokenizer)
    assert expected is not None
    assert fingerprint(transformers.AutoTokenizer.from_pretrained(tmp_path)) == expected
    tokenizer(['one two three', 'four'], truncation=True, max_length=2, padding='max_length')
    assert fingerprint(tokenizer) == expected
    tokenizer.padding_side, tokenizer.model_max_length, tokenizer.chat_template = 'left', 7, '{{ messages }}'
    assert fingerprint(tokenizer) == expected


def test_the_name_for_records_is_the_same_from_another_folder_and_after_use(tmp_path):
    tokenizer = fast()
    tokenizer.save_pretrained(tmp_path)
    name = Encoder(tokenizer).name
    assert name.startswith('PreTrainedTokenizerFast 900 (')
    assert Encoder(transformers.AutoTokenizer.from_pretrained(tmp_path)).name == name
    tokenizer(['one two three', 'four'], truncation=True, max_length=2, padding='max_length')
    assert Encoder(tokenizer).name == name


def test_the_name_for_records_tells_vocabularies_and_chat_templates_apart(tmp_path):
    other = fast()
    other.chat_template = '{{ messages }}'
    names = {Encoder(tokenizer).name for tokenizer in (fast(), added(fast()), without_merge(fast(), tmp_path), other)}
    assert len(names) == 4


def added(tokenizer):
    tokenizer.add_tokens(['squad'])
    return tokenizer


def splitting(tokenizer):
    tokenizer.split_special_tokens = True
    return tokenizer


def other_eos(tokenizer):
    tokenizer.eos_token = '<pad>'
    return tokenizer


def without_merge(tokenizer, folder):
    """The last merge is forgotten: the vocabulary is the same, the ids are not."""
    tokenizer.save_pretrained(folder)
    content = json.loads((folder / 'tokenizer.json').read_text())
    content['model']['merges'].pop()
    (folder / 'tokenizer.json').write_text(json.dumps(content))
    return transformers.AutoTokenizer.from_pretrained(folder)


def test_whatever_changes_the_ids_of_a_fast_tokenizer_changes_its_fingerprint(tmp_path):
    tokenizers = [
        fast(),
        added(fast()),
        splitting(fast()),
        other_eos(fast()),
        without_merge(fast(), tmp_path),
        llama(),
        llama(add_bos_token=False),
        llama(add_eos_token=True),
        transformers.AutoTokenizer.from_pretrained(FIXTURES / 'models' / 'alibi_pad_eos'),
    ]
    assert len({fingerprint(tokenizer) for tokenizer in tokenizers}) == len(tokenizers)


def test_a_switch_that_is_turned_later_changes_the_fingerprint():
    tokenizer = llama()
    before = fingerprint(tokenizer)
    tokenizer.add_bos_token = False
    after = fingerprint(tokenizer)
    assert after != before
    tokenizer.add_bos_token = True
    assert fingerprint(tokenizer) == before


def slow(folder, *, merges=('a b', 'ab c'), **changes):
    """GPT-2's tokenizer in Python: its merges are in no vocabulary."""
    folder.mkdir(exist_ok=True)
    words = ['a', 'b', 'c', 'ab', 'abc', 'bc', '<|endoftext|>']
    (folder / 'vocab.json').write_text(json.dumps({word: index for index, word in enumerate(words)}))
    (folder / 'merges.txt').write_text('#version: 0.2\n' + '\n'.join(merges) + '\n')
    return transformers.GPT2Tokenizer(str(folder / 'vocab.json'), str(folder / 'merges.txt'), **changes)


def test_whatever_changes_the_ids_of_a_slow_tokenizer_changes_its_fingerprint(tmp_path):
    expected = fingerprint(slow(tmp_path / 'a'))
    assert expected is not None
    assert fingerprint(slow(tmp_path / 'b')) == expected
    used = slow(tmp_path / 'a')
    used('abc')
    assert fingerprint(used) == expected
    tokenizers = [
        slow(tmp_path / 'c', merges=('b c', 'a bc')),
        slow(tmp_path / 'a', add_bos_token=True),
        slow(tmp_path / 'a', errors='strict'),
        added(slow(tmp_path / 'a')),
        transformers.ByT5Tokenizer(),
        transformers.ByT5Tokenizer(extra_ids=10),
    ]
    assert len({expected, *map(fingerprint, tokenizers)} - {None}) == len(tokenizers) + 1


def test_a_class_of_ones_own_is_told_by_its_source(tmp_path, monkeypatch):
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


def test_of_a_tokenizer_of_another_kind_nothing_is_said(character_tokenizer):
    assert fingerprint(character_tokenizer) is None
