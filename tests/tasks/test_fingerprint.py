import json

import transformers
from paths import FIXTURES

from llmfoundry_gauntlet.tasks.encode import Encoder

FOLDER = FIXTURES / 'models' / 'rotary_bos'


def fast(**changes):
    return transformers.AutoTokenizer.from_pretrained(FOLDER, **changes)


def llama(**changes):
    """Return the class that most Llama models name."""
    return transformers.LlamaTokenizerFast.from_pretrained(FOLDER, **changes)


def fingerprint(tokenizer) -> str | None:
    return Encoder(tokenizer).fingerprint


def test_fingerprint_and_name_do_not_depend_on_folder_or_use(tmp_path):
    tokenizer = fast()
    tokenizer.save_pretrained(tmp_path)
    expected = fingerprint(tokenizer)
    assert expected is not None
    assert fingerprint(transformers.AutoTokenizer.from_pretrained(tmp_path)) == expected
    name = Encoder(tokenizer).name
    assert name.startswith('PreTrainedTokenizerFast 900 (')
    assert Encoder(transformers.AutoTokenizer.from_pretrained(tmp_path)).name == name
    tokenizer(['one two three', 'four'], truncation=True, max_length=2, padding='max_length')
    assert fingerprint(tokenizer) == expected and Encoder(tokenizer).name == name
    tokenizer.padding_side, tokenizer.model_max_length, tokenizer.chat_template = 'left', 7, '{{ messages }}'
    assert fingerprint(tokenizer) == expected


def test_names_differ_by_vocabulary_and_chat_template(tmp_path):
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
    """Remove the last merge: the vocabulary is the same, the ids are not."""
    tokenizer.save_pretrained(folder)
    content = json.loads((folder / 'tokenizer.json').read_text())
    content['model']['merges'].pop()
    (folder / 'tokenizer.json').write_text(json.dumps(content))
    return transformers.AutoTokenizer.from_pretrained(folder)


def test_what_changes_the_ids_of_a_fast_tokenizer_changes_its_fingerprint(tmp_path):
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


def test_a_setting_changed_later_changes_the_fingerprint():
    tokenizer = llama()
    before = fingerprint(tokenizer)
    tokenizer.add_bos_token = False
    after = fingerprint(tokenizer)
    assert after != before
    tokenizer.add_bos_token = True
    assert fingerprint(tokenizer) == before


def slow(folder, *, merges=('a b', 'ab c'), **changes):
    """Return GPT-2's tokenizer in Python, whose merges are in no vocabulary."""
    folder.mkdir(exist_ok=True)
    words = ['a', 'b', 'c', 'ab', 'abc', 'bc', '<|endoftext|>']
    (folder / 'vocab.json').write_text(json.dumps({word: index for index, word in enumerate(words)}))
    (folder / 'merges.txt').write_text('#version: 0.2\n' + '\n'.join(merges) + '\n')
    return transformers.GPT2Tokenizer(str(folder / 'vocab.json'), str(folder / 'merges.txt'), **changes)


def test_what_changes_the_ids_of_a_slow_tokenizer_changes_its_fingerprint(tmp_path):
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


def test_an_unknown_kind_of_tokenizer_has_no_fingerprint(character_tokenizer):
    assert fingerprint(character_tokenizer) is None
