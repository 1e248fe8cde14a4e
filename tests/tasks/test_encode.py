"""Token ids of prompts, and what identifies a tokenizer."""

import copy
import importlib
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import networks
import numpy as np
import pytest
import transformers
from character_tokenizer import CharacterTokenizer
from paths import FIXTURES
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerFast

from llmfoundry_gauntlet.engine.decoding import GenerationDecoder
from llmfoundry_gauntlet.errors import ModelError
from llmfoundry_gauntlet.evaluation.suite import load_suite
from llmfoundry_gauntlet.tasks.encode import Encoder
from llmfoundry_gauntlet.tasks.generation import OpenQuestion
from llmfoundry_gauntlet.tasks.items import Preparation
from llmfoundry_gauntlet.tasks.language_modeling import Passage
from llmfoundry_gauntlet.tasks.multiple_choice import Choices
from llmfoundry_gauntlet.tasks.schema import Schema
from llmfoundry_gauntlet.types import Example, Prompt

FOLDER = FIXTURES / 'models' / 'rotary_bos'


def fast(name: str = 'rotary_bos', **changes):
    return AutoTokenizer.from_pretrained(FIXTURES / 'models' / name, **changes)


def text_of(ids: np.ndarray) -> str:
    return ''.join('^' if i == 1 else chr(i) for i in ids)


def ids_of(encoder: Encoder, *texts: str, special: bool = False) -> list[list[int]]:
    ids_by_text = encoder.encode(list(texts), special=special)
    return [ids_by_text[text].tolist() for text in texts]


@pytest.mark.parametrize('as_reference', [False, True])
def test_parts_are_tokenized_separately_and_only_the_first_gets_special_tokens(character_tokenizer, as_reference: bool):
    """Continuations get a space; in llm-foundry only if the tokenizer merges it."""
    prompt = Prompt(preamble='shots', contexts=('query',), continuations=('x', ' yz'), as_reference=as_reference)

    (parts,) = Encoder(character_tokenizer).prompts([prompt])

    assert text_of(parts.preamble) == '^shots'
    assert [text_of(ids) for ids in parts.contexts] == ['query']
    assert [text_of(ids) for ids in parts.continuations] == ['x' if as_reference else ' x', ' yz']
    assert {ids.dtype for ids in (parts.preamble, *parts.contexts, *parts.continuations)} == {np.dtype(np.int32)}


@pytest.mark.parametrize(
    ('eos', 'text', 'expected'),
    [
        ('!', 'a!', '^a'),
        ('\1', '', '^'),  # bos and eos are one token, and it is all there is
        ('b', 'a!', '^a!'),
    ],
)
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
    tokenizer = fast()
    texts = ['one two three', '<s>a</s>', ' \n\n']
    expected = tokenizer(texts)['input_ids']

    tokenizer(texts, truncation=True, max_length=2, padding='max_length')

    assert ids_of(Encoder(tokenizer), *texts, special=True) == expected


def test_slow_tokenizers_give_their_own_ids():
    encoder = Encoder(ByT5Tokenizer())  # a byte b is the id b + 3
    assert ids_of(encoder, 'ab', ' ') == [[100, 101], [35]]
    assert encoder.preambles(['a'])['a'].tolist() == [100]  # without the eos that it adds


def test_a_word_gets_no_space_from_a_tokenizer_that_adds_one_to_every_first_token():
    metaspace = Tokenizer(models.WordLevel({'▁': 0, '▁a': 1, '▁A': 2, '<unk>': 3}, unk_token='<unk>'))
    metaspace.pre_tokenizer = pre_tokenizers.Metaspace()
    metaspace.decoder = decoders.Metaspace()

    encoder = Encoder(PreTrainedTokenizerFast(tokenizer_object=metaspace, unk_token='<unk>'))

    assert encoder.adds_space
    assert encoder.word_after(' A') == 'A'
    assert ids_of(encoder, 'A', ' A')[0] == [2]


def test_a_word_gets_one_space_with_a_tokenizer_that_adds_none():
    encoder = Encoder(CharacterTokenizer())

    assert not encoder.adds_space
    assert encoder.word_after(' A') == ' A'
    assert encoder.word_after('A') == ' A'


# The space between a context and a continuation.


def words_of(*texts: str) -> dict[str, int]:
    return {text: number for number, text in enumerate(('<unk>', '<s>', '</s>', *texts))}


LETTERS = 'TheIRomParistlyfcupdbgw?Q:A.024+='


def built(model, **parts):
    """Return a tokenizer of a model and other parts: `pre_tokenizer`, `decoder`, `normalizer`."""
    tokenizer = Tokenizer(model)
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token='<unk>',
        bos_token='<s>',
        eos_token='</s>',
        clean_up_tokenization_spaces=False,
    )


def split_spaces(merged: bool = False):
    """Return byte-level BPE without tokens that begin with a space, or with ' a' and ' R'."""
    marked = ('Ġa', 'ĠR') if merged else ()
    vocabulary = words_of(*sorted({'Ġ', 'Ċ', *LETTERS}), 'om', *marked)
    merges = [('o', 'm'), *(tuple(word) for word in marked)]
    return built(
        models.BPE(vocabulary, merges, unk_token='<unk>'),
        pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        decoder=decoders.ByteLevel(),
    )


def spaces_as_tokens():
    """Return words and single spaces as tokens, joined as they are."""
    vocabulary = words_of(' ', '\n', *sorted(set(LETTERS)))
    return built(
        models.BPE(vocabulary, [], unk_token='<unk>'),
        pre_tokenizer=pre_tokenizers.Split(' ', 'isolated'),
        decoder=decoders.Fuse(),
    )


def metaspace(prepend_scheme: str):
    """Return pieces like those of SentencePiece, whose spaces are a mark, prepended as `prepend_scheme` says."""
    vocabulary = words_of('▁', '\n', *sorted(set(LETTERS)), '▁R')
    return built(
        models.BPE(vocabulary, [('▁', 'R')], unk_token='<unk>'),
        pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme, split=False),
        decoder=decoders.Metaspace(prepend_scheme=prepend_scheme, split=False),
    )


def legacy_llama():
    """Return the same with the mark prepended to every text, as Llama's tokenizer does."""
    vocabulary = words_of('▁', '\n', *sorted(set(LETTERS)), '▁a')
    return built(
        models.BPE(vocabulary, [('▁', 'a')], unk_token='<unk>'),
        normalizer=normalizers.Sequence([normalizers.Prepend('▁'), normalizers.Replace(' ', '▁')]),
        decoder=decoders.Sequence([decoders.Replace('▁', ' '), decoders.Fuse(), decoders.Strip(' ', 1, 0)]),
    )


TOKENIZERS = {
    # A tokenizer, and whether llm-foundry loses the space: it does where the space is a token of its own.
    'bytes': (ByT5Tokenizer(), True),
    'characters': (CharacterTokenizer(), True),
    'split-space BPE': (split_spaces(), True),
    'spaces as tokens': (spaces_as_tokens(), True),
    'mark only where there is a space': (metaspace('never'), True),
    # These merge the space with the word, or prepend it themselves.
    'like GPT-2': (split_spaces(merged=True), False),
    'mark before the first word': (metaspace('first'), False),
    'mark before every text': (metaspace('always'), False),
    'like Llama': (legacy_llama(), False),
    'of a recorded model': (fast(), False),
}
every_tokenizer = pytest.mark.parametrize(('tokenizer', 'is_lost'), TOKENIZERS.values(), ids=list(TOKENIZERS))


def read(tokenizer, parts, choice: int = 0) -> str:
    """Return the text that the model reads for a choice, without special tokens."""
    special_ids = getattr(tokenizer, 'all_special_ids', [1])
    context = parts.contexts[0] if len(parts.contexts) == 1 else parts.contexts[choice]
    ids = np.concatenate([parts.preamble, context, parts.continuations[choice]]).tolist()
    return tokenizer.decode([token for token in ids if token not in special_ids])


def text_after_shot(encoder, kind: str, semantics: str, **keys) -> list[str]:
    """Return what the model reads for each choice of the first row, after the second row as a shot."""
    contents = {
        'multiple_choice': [Choices('Q: I', ('Rom', 'Paris'), 0), Choices('Q: A', ('Rom', 'Paris'), 1)],
        'language_modeling': [Passage('The cup is', 'Rom'), Passage('The bag is', 'Paris')],
        'schema': [Schema(('The cup', 'The bag'), 'is Rom', 0), Schema(('A cup', 'A bag'), 'is Paris', 1)],
    }[kind]
    entry = {'label': 't', 'dataset_uri': 'x', 'num_fewshot': [1], 'icl_task_type': kind, **keys}
    task = replace(load_suite([entry]).tasks[0], semantics=semantics)
    asked = Example(row=0, content=contents[0])
    shot = Example(row=1, content=contents[1])
    (parts,) = encoder.prompts([task.prompt(asked, [shot])])
    return [read(encoder.tokenizer, parts, choice) for choice in range(len(parts.continuations))]


@every_tokenizer
@pytest.mark.parametrize(
    ('kind', 'keys', 'expected'),
    [
        ('multiple_choice', {}, ['Q: A Paris\nQ: I Rom', 'Q: A Paris\nQ: I Paris']),
        ('multiple_choice', {'continuation_delimiter': '\nA: '}, ['Q: A\nA: Paris\nQ: I\nA: Rom']),
        ('language_modeling', {}, ['The bag is Paris\nThe cup is Rom']),
        ('schema', {}, ['A bag is Paris\nThe cup is Rom', 'A bag is Paris\nThe bag is Rom']),
    ],
)
def test_a_choice_follows_its_context_as_it_does_in_shots(tokenizer, is_lost, kind, keys, expected):
    """llm-foundry loses the space with tokenizers that split it off."""
    encoder = Encoder(tokenizer)

    corrected = text_after_shot(encoder, kind, 'corrected', **keys)
    reference = text_after_shot(encoder, kind, 'reference', **keys)

    # SentencePiece begins every text with a space, also that after the shots.
    assert [text.replace(' \n', '\n') for text in corrected[: len(expected)]] == expected
    assert (reference == corrected) == (not is_lost)
    if is_lost:
        # One character less, and it is a space.
        assert [len(text) for text in reference] == [len(text) - 1 for text in corrected]
        assert [text.replace(' ', '') for text in reference] == [text.replace(' ', '') for text in corrected]


IN_CHAT = "{% for message in messages %}{{ message['content'] }}{% endfor %}\nA:"


@every_tokenizer
@pytest.mark.parametrize('semantics', ['corrected', 'reference'])
@pytest.mark.parametrize(
    'prompt',
    [
        Prompt(contexts=('Q: I',), continuations=('Rom', ' Rom')),
        Prompt(contexts=('Q: I\nA:',), continuations=('Paris', 'Rom')),
        Prompt(contexts=('The cup', 'The bag'), continuations=('is Rom', 'is Rom')),
        Prompt(preamble='Q: I Rom', contexts=('\nQ: I',), continuations=('Rom', '\nRom')),
        Prompt(contexts=('Q: I',), continuations=('Rom', ' Rom'), chat_template=True),
        Prompt(contexts=('Q: I',), continuations=('Rom',), lead='A:', chat_template=True),
        Prompt(contexts=('Q: I',), continuations=('Rom',), lead='A:'),
        Prompt(contexts=('Q: I',)),
    ],
)
def test_a_written_prompt_and_its_choice_are_joined_what_the_model_reads(tokenizer, is_lost, semantics, prompt):
    """Mutations: choices as they are in the data; no space for tokenizers that put one before each text."""
    tokenizer = copy.deepcopy(tokenizer)
    if prompt.chat_template:
        if isinstance(tokenizer, CharacterTokenizer):
            pytest.skip('it has no chat template')
        tokenizer.chat_template = IN_CHAT
    encoder = Encoder(tokenizer)
    prompt = replace(prompt, as_reference=semantics == 'reference')

    text, choices = encoder.texts(prompt)

    (parts,) = encoder.prompts([prompt])
    assert len(choices) == len(prompt.continuations)
    contexts = text.split('\0')
    for place, choice in enumerate(choices):
        context = contexts[0] if len(contexts) == 1 else contexts[place]
        # SentencePiece begins every text with a space, also that after the shots.
        assert read(tokenizer, parts, place).replace('Rom \nQ', 'Rom\nQ') == context + choice
        assert is_lost or prompt.chat_template or choice[0] == ' '


@every_tokenizer
def test_token_ids_of_tokenizers_that_keep_the_space_are_llm_foundrys(tokenizer, is_lost):
    prompts = [
        Prompt(contexts=('Q: I',), continuations=('Rom', ' Paris'), as_reference=as_reference)
        for as_reference in (False, True)
    ]

    corrected, reference = Encoder(tokenizer).prompts(prompts)

    pairs = zip(corrected.continuations, reference.continuations, strict=True)
    assert [np.array_equal(ids, ids_of_reference) for ids, ids_of_reference in pairs] == [not is_lost, True]


@every_tokenizer
def test_white_space_that_is_there_is_not_doubled(tokenizer, is_lost):
    """In rows that are not stripped. With other tokenizers it is llm-foundry's text, which has two spaces."""
    prompt = Prompt(contexts=('Q: ', 'Q:\n', 'Q:'), continuations=('Rom', 'Rom', '\nRom'))

    (parts,) = Encoder(tokenizer).prompts([prompt])

    if is_lost:
        assert [read(tokenizer, parts, choice) for choice in range(3)] == ['Q: Rom', 'Q:\nRom', 'Q:\nRom']


@every_tokenizer
@pytest.mark.parametrize('semantics', ['corrected', 'reference'])
def test_a_generation_has_room_for_its_space_and_gets_none_that_it_has(tokenizer, is_lost, semantics):
    entry = {'label': 't', 'dataset_uri': 'x', 'num_fewshot': [0], 'icl_task_type': 'generation_task_with_answers'}
    task = replace(load_suite([entry]).tasks[0], semantics=semantics)
    examples = [Example(row=0, content=OpenQuestion('Q: I', ('Rom',), None))]
    (item,) = Preparation(task=task, examples=examples, encoder=Encoder(tokenizer), max_seq_len=50).items()
    before, whole = tokenizer(['Q: I', 'Q: I Rom'], add_special_tokens=False)['input_ids']
    generated = whole[len(before) :]

    text = GenerationDecoder(tokenizer).text(generated, restores_space=item.request.restores_space)

    if not is_lost:
        assert text == ' Rom'
    else:
        assert text == {'corrected': ' Rom', 'reference': '  Rom'}[semantics]
        assert item.request.max_new_tokens >= len(generated) or semantics == 'reference'


# Texts that begin with a newline, in parts and as one text.


def sign_with_line_end():
    """Return byte-level BPE that merges a full stop with the newline after it, as Llama 3's does."""
    vocabulary = words_of(*sorted({'Ġ', 'Ċ', *LETTERS}), '.Ċ', 'Ġa')
    return built(
        models.BPE(vocabulary, [('.', 'Ċ'), ('Ġ', 'a')], unk_token='<unk>'),
        pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        decoder=decoders.ByteLevel(),
    )


@pytest.mark.parametrize('as_reference', [False, True])
@pytest.mark.parametrize(
    ('tokenizer', 'of_parts', 'of_one_text'),
    [
        (legacy_llama(), '▁ R o m . | ▁ ↵ Q : ▁ A | ▁ P', '▁ R o m . ↵ Q : ▁ A ▁ P'),
        (metaspace('first'), '▁R o m . | ▁ ↵ Q : ▁ A | ▁ P', '▁R o m . ↵ Q : ▁ A ▁ P'),
        (sign_with_line_end(), 'R o m . | Ċ Q : Ġ A | Ġ P', 'R o m .Ċ Q : Ġ A Ġ P'),
        (split_spaces(merged=True), 'R om . | Ċ Q : Ġ A | Ġ P', 'R om . Ċ Q : Ġ A Ġ P'),
    ],
    ids=['like Llama 2', 'mark before the first word', 'like Llama 3', 'like GPT-2'],
)
def test_the_newline_before_a_question_has_the_tokens_of_a_text_of_its_own(
    tokenizer, of_parts, of_one_text, as_reference
):
    """As in llm-foundry, with both semantics; the page on migrating shows it."""
    prompt = Prompt(preamble='Rom.', contexts=('\nQ: A',), continuations=('P',), as_reference=as_reference)

    (parts,) = Encoder(tokenizer).prompts([prompt])
    ids_of_one_text = tokenizer('Rom.\nQ: A P', add_special_tokens=False)['input_ids']

    def shown(ids: Sequence[int]) -> str:
        return ' '.join(tokenizer.convert_ids_to_tokens(ids)).replace('\n', '↵')

    assert ' | '.join(map(shown, (parts.preamble, *parts.contexts, *parts.continuations))) == of_parts
    assert shown(ids_of_one_text) == of_one_text


@pytest.mark.parametrize(
    ('tokenizer', 'expected'),
    [(legacy_llama(), ['▁', '\n', 'R']), (split_spaces(merged=True), ['Ġ', 'Ċ', 'R'])],
    ids=['like Llama', 'like GPT-2'],
)
def test_a_continuation_that_begins_with_a_newline_has_a_space_before_it(tokenizer, expected):
    (parts,) = Encoder(tokenizer).prompts([Prompt(contexts=('Q: I',), continuations=('\nRom',))])

    assert tokenizer.convert_ids_to_tokens(parts.continuations[0])[:3] == expected


@every_tokenizer
@pytest.mark.parametrize('gold', [' Rom', '\nRom', 'Rom', '    Rom\n    at', '\n\n    Rom'])
def test_a_right_generation_is_read_with_its_own_white_space(tokenizer, is_lost, gold: str):
    """Mutation: the space that SentencePiece adds to a text comes before that of the text, or before its line."""
    encoder = Encoder(tokenizer)
    prompt = Prompt(contexts=('Q: I',))
    (parts,) = encoder.prompts([prompt])

    (ids,) = encoder.golds([prompt], [gold], is_verbatim=False)

    assert ids is not None
    assert read(tokenizer, replace(parts, continuations=(ids,))) == f'Q: I{gold}'


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


def test_a_tokenizer_has_a_fingerprint_and_a_name():
    encoder = Encoder(fast())

    assert encoder.fingerprint is not None
    assert encoder.name.startswith(f'{type(encoder.tokenizer).__name__} 900 (')


def test_fingerprint_and_name_do_not_depend_on_the_folder(tmp_path):
    tokenizer = fast()
    tokenizer.save_pretrained(tmp_path)
    copied = AutoTokenizer.from_pretrained(tmp_path)

    assert fingerprint(copied) == fingerprint(tokenizer)
    assert Encoder(copied).name == Encoder(tokenizer).name


def test_fingerprint_and_name_do_not_depend_on_use():
    tokenizer = fast()
    expected = (fingerprint(tokenizer), Encoder(tokenizer).name)

    tokenizer(['one two three', 'four'], truncation=True, max_length=2, padding='max_length')

    assert (fingerprint(tokenizer), Encoder(tokenizer).name) == expected


def test_what_changes_no_ids_does_not_change_the_fingerprint():
    tokenizer = fast()
    expected = fingerprint(tokenizer)

    changed(tokenizer, padding_side='left', model_max_length=7, chat_template='{{ messages }}')

    assert fingerprint(tokenizer) == expected


def test_a_class_about_which_nothing_is_known_has_no_fingerprint(character_tokenizer):
    assert fingerprint(character_tokenizer) is None


def test_names_differ_by_vocabulary_and_chat_template(tmp_path):
    tokenizers = [
        fast(),
        added(fast()),
        without_merge(fast(), tmp_path),
        changed(fast(), chat_template='{{ messages }}'),
    ]

    assert len({Encoder(tokenizer).name for tokenizer in tokenizers}) == len(tokenizers)


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


@pytest.mark.skipif(
    networks.IS_TRANSFORMERS_5,
    reason='transformers 5 writes the template of special tokens anew: the ids are cached once more',
)
def test_a_setting_that_is_set_back_gives_the_former_fingerprint():
    tokenizer = changed(llama(), add_bos_token=False)
    assert fingerprint(tokenizer) != fingerprint(llama())

    changed(tokenizer, add_bos_token=True)

    assert fingerprint(tokenizer) == fingerprint(llama())


def slow(folder, *, merges=('a b', 'ab c'), **changes):
    """Return GPT-2's tokenizer in Python, whose merges are in no vocabulary."""
    folder.mkdir(exist_ok=True)
    words = ['a', 'b', 'c', 'ab', 'abc', 'bc', '<|endoftext|>']
    (folder / 'vocab.json').write_text(json.dumps({word: index for index, word in enumerate(words)}))
    (folder / 'merges.txt').write_text('#version: 0.2\n' + '\n'.join(merges) + '\n')
    return transformers.GPT2Tokenizer(str(folder / 'vocab.json'), str(folder / 'merges.txt'), **changes)


def test_the_fingerprint_of_a_slow_tokenizer_does_not_depend_on_folder_or_use(tmp_path):
    tokenizer = slow(tmp_path / 'a')
    expected = fingerprint(tokenizer)

    tokenizer('abc')

    assert expected is not None
    assert fingerprint(tokenizer) == expected
    assert fingerprint(slow(tmp_path / 'b')) == expected


@pytest.mark.parametrize('kind', [ByT5Tokenizer, transformers.CanineTokenizer])
def test_fingerprint_and_name_of_a_slow_tokenizer_are_the_same_once_it_was_saved_and_loaded(tmp_path, kind: Any):
    tokenizer = kind()
    tokenizer.save_pretrained(tmp_path / 'a')
    loaded = kind.from_pretrained(tmp_path / 'a')
    loaded.save_pretrained(tmp_path / 'b')
    loaded_again = kind.from_pretrained(tmp_path / 'b')

    encoders = [Encoder(each) for each in (tokenizer, loaded, loaded_again)]

    assert None not in {encoder.fingerprint for encoder in encoders}
    assert len({encoder.fingerprint for encoder in encoders}) == 1
    assert len({encoder.name for encoder in encoders}) == 1


def ctrl(folder, *, merges=('a b', 'ab c'), **changes):
    """Return a tokenizer that is in Python on both stacks, whose merges are in no vocabulary."""
    slow(folder, merges=merges)
    return transformers.CTRLTokenizer(str(folder / 'vocab.json'), str(folder / 'merges.txt'), **changes)


def test_what_changes_the_ids_of_a_tokenizer_in_python_changes_its_fingerprint(tmp_path):
    unknown = '<|endoftext|>'
    stripping = ctrl(tmp_path / 'a', unk_token=unknown)
    stripping.add_tokens([transformers.AddedToken('squad', lstrip=True)])
    tokenizers = [
        ctrl(tmp_path / 'a', unk_token=unknown),
        ctrl(tmp_path / 'b', unk_token=unknown, merges=('b c', 'a bc')),
        ctrl(tmp_path / 'a', unk_token='a'),
        ctrl(tmp_path / 'a', unk_token=unknown, additional_special_tokens=['bc']),
        added(ctrl(tmp_path / 'a', unk_token=unknown)),
        stripping,
    ]

    fingerprints = [fingerprint(tokenizer) for tokenizer in tokenizers]

    assert None not in fingerprints
    assert len(set(fingerprints)) == len(tokenizers)


def test_what_changes_the_ids_of_a_slow_tokenizer_changes_its_fingerprint(tmp_path):
    tokenizers = [
        slow(tmp_path / 'a'),
        slow(tmp_path / 'c', merges=('b c', 'a bc')),
        slow(tmp_path / 'a', add_bos_token=True),
        added(slow(tmp_path / 'a')),
        ByT5Tokenizer(),
        ByT5Tokenizer(extra_ids=10),
    ]

    fingerprints = [fingerprint(tokenizer) for tokenizer in tokenizers]

    assert None not in fingerprints
    assert len(set(fingerprints)) == len(tokenizers)


def test_how_ids_are_decoded_does_not_matter_to_a_tokenizer_in_rust(tmp_path):
    """GPT-2's is in Rust since transformers 5. In Python it is saved with all settings, also those of decoding."""
    by_default, strict = slow(tmp_path / 'a'), slow(tmp_path / 'a', errors='strict')

    assert by_default('abc a')['input_ids'] == strict('abc a')['input_ids']
    is_same = fingerprint(by_default) == fingerprint(strict)
    assert is_same == hasattr(by_default, 'backend_tokenizer')


def test_custom_tokenizer_classes_differ_by_their_source(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    fingerprints = []
    for name, note in (('own_a', 'x'), ('own_b', 'y')):
        (tmp_path / f'{name}.py').write_text(
            f'from transformers import PreTrainedTokenizerFast as Fast\nclass Own(Fast):\n    NOTE = "{note}"\n'
        )
        module = importlib.import_module(name)
        # Both classes say that they are of one module, so that only their sources differ.
        module.Own.__module__ = 'own'
        monkeypatch.setitem(sys.modules, 'own', module)
        fingerprints.append(fingerprint(module.Own.from_pretrained(FOLDER)))

    assert None not in fingerprints
    assert len(set(fingerprints)) == 2
