"""Log-probabilities from logits by hand, and sampling compared with transformers' processors on a grid of draws."""

from __future__ import annotations

import math

import networks
import numpy as np
import pytest
import torch
from networks import CPU, PREFIX_BUDGET
from transformers import LlamaConfig, LlamaForCausalLM, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from llmfoundry_gauntlet.engine import logits as reducing
from llmfoundry_gauntlet.engine.logits import LogitReader, draw_tokens, next_tokens, output_layer, reading
from llmfoundry_gauntlet.engine.model import CausalLanguageModel
from llmfoundry_gauntlet.engine.plan import PADDED_ROWS, plan
from llmfoundry_gauntlet.engine.trees import lay_out_rows
from llmfoundry_gauntlet.types import Sampling


def reader(reads: list[int], targets: list[int]) -> LogitReader:
    return LogitReader(np.array(reads), np.array(targets, dtype=np.int32), CPU)


def test_log_probabilities_flags_and_ties_by_hand():
    """Position 0 is read three times and positions out of order.

    Mutations: values stay in the order of positions; the last of a tie is the argmax; ties counted for tokens below the
    top.
    """
    logits = torch.tensor(
        [
            [0.0, 0.0, math.log(2), math.log(4)],  # probabilities 1/8, 1/8, 2/8, 4/8
            [5.0, 1.0, 5.0, 1.0],  # two tie at the top
            [-3.0, -3.0, -3.0, -3.0],  # all tie
        ]
    )
    half = 1 / (2 + 2 * math.exp(-4))
    expected = [
        # position, target, probability, is the argmax, entries at the top
        (2, 3, 1 / 4, False, 4),
        (0, 3, 1 / 2, True, 1),
        (1, 2, half, False, 2),
        (0, 0, 1 / 8, False, 0),
        (1, 0, half, True, 2),
        (0, 2, 1 / 4, False, 0),
        (2, 0, 1 / 4, True, 4),
    ]
    reads, targets, probabilities, flags, ties = map(list, zip(*expected, strict=True))

    logit_reader = reader(reads, targets)
    logit_reader.take(logits.clone())
    logprobs, is_argmax, num_top = logit_reader.scores()

    np.testing.assert_allclose(logprobs, np.log(probabilities), atol=1e-6)
    assert logprobs.dtype == np.float64
    assert is_argmax.tolist() == flags
    assert num_top.tolist() == ties


def random_case(offset: float = 0.0) -> tuple[torch.Tensor, np.ndarray, np.ndarray, np.ndarray]:
    """Return logits of 50 positions, 80 reads with repeated and unread positions, and exact log-probabilities."""
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(rng.normal(offset, 5, (50, 30)).astype(np.float32))
    reads = rng.integers(0, 40, 80)
    targets = rng.integers(0, 30, 80)
    logprobs = logits.double().log_softmax(-1).numpy()
    return logits, reads, targets, logprobs[reads, targets]


@pytest.mark.parametrize('size', [1, 7, 40, 512])
@pytest.mark.parametrize('offset', [0.0, -100.0, 1000.0])
def test_chunks_of_any_size_give_the_same_values_whatever_the_offset_of_logits(size: int, offset: float):
    """GPT-2's logits are near -100.

    Mutations: `num_taken` not advanced; `side='right'` in the search for a chunk's reads; the offset added to the
    logarithm of the sum, then subtracted.
    """
    logits, reads, targets, exact_logprobs = random_case(offset)
    most_probable = logits.argmax(dim=1).numpy()

    logit_reader = LogitReader(reads, targets, CPU)
    for chunk in logits[logit_reader.places].split(size):
        logit_reader.take(chunk)
    logprobs, is_argmax, _ = logit_reader.scores()

    np.testing.assert_allclose(logprobs, exact_logprobs, rtol=0, atol=5e-6)
    assert is_argmax.tolist() == (most_probable[reads] == targets).tolist()


@pytest.mark.parametrize(('dtype', 'tolerance'), [(torch.float32, 1e-5), (torch.float16, 0.05)])
def test_the_logits_of_a_model_are_not_modified(monkeypatch, dtype: torch.dtype, tolerance: float):
    """A model may return its own tensor. Mutation: `logits` for `logits[places]` in `take_all`."""
    monkeypatch.setattr(reducing, 'CHUNK', 7)
    logits, reads, targets, exact_logprobs = random_case()
    logits = logits.to(dtype)
    before = logits.clone()

    logit_reader = LogitReader(reads, targets, CPU)
    logit_reader.take_all(logits)

    assert torch.equal(logits, before)
    np.testing.assert_allclose(logit_reader.scores()[0], exact_logprobs, atol=tolerance)


def test_huge_logits_do_not_overflow():
    logit_reader = reader([0, 0], [0, 1])

    logit_reader.take(torch.tensor([[1e30, 0.0, 1e30]]))

    logprobs, _, _ = logit_reader.scores()
    assert logprobs.tolist() == pytest.approx([-math.log(2), -1e30])


def test_missing_positions_are_an_error():
    logit_reader = reader([0, 3], [1, 1])
    logit_reader.take(torch.zeros(1, 4))

    with pytest.raises(RuntimeError, match='logits of 1 positions were made, 2 are read'):
        logit_reader.scores()


@pytest.mark.parametrize('size', [3, 512])
def test_the_output_layer_computes_only_the_positions_read(monkeypatch, size: int):
    """At most a chunk of them at a time. Mutation: leave out `reader.places`."""
    monkeypatch.setattr(reducing, 'CHUNK', size)
    torch.manual_seed(0)
    layer = torch.nn.Linear(8, 30)
    hidden = torch.randn(2, 25, 8)
    _, reads, targets, _ = random_case()
    exact_logits = torch.nn.functional.linear(hidden.double(), layer.weight.double(), layer.bias.double())
    exact_logprobs = exact_logits.reshape(50, 30).log_softmax(-1)[reads, targets].detach().numpy()
    logit_reader = LogitReader(reads, targets, CPU)
    sizes_of_chunks = []

    def record_size(logits: torch.Tensor) -> torch.Tensor:
        sizes_of_chunks.append(len(logits))
        return logits

    with torch.no_grad(), reading(layer, logit_reader, record_size):
        output = layer(hidden)

    assert output.numel() == 1
    np.testing.assert_allclose(logit_reader.scores()[0], exact_logprobs, atol=1e-5)
    assert sum(sizes_of_chunks) == len(set(reads.tolist()))
    assert max(sizes_of_chunks) <= size


class ScaledAndShifted(LlamaForCausalLM):
    """A model that changes its logits in a way that no configuration names."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.shift = torch.nn.Parameter(torch.randn(config.vocab_size))

    def forward(self, *args, **kwargs):
        outputs = super().forward(*args, **kwargs)
        outputs.logits = outputs.logits * 1.7 + self.shift
        return outputs


class CutLogits(LlamaForCausalLM):
    """A model whose output layer has more rows than tokens, for speed, which its logits leave out."""

    def forward(self, *args, **kwargs):
        outputs = super().forward(*args, **kwargs)
        outputs.logits = outputs.logits[..., : networks.VOCABULARY - 1]
        return outputs


class ByEmbedding(LlamaForCausalLM):
    """A model that makes its logits from an embedding, without an output layer."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.lm_head = None
        self.embedding = torch.nn.Embedding(config.vocab_size, config.hidden_size)
        torch.nn.init.normal_(self.embedding.weight, std=0.3)

    def get_output_embeddings(self):
        return self.embedding

    def forward(self, input_ids, **kwargs):
        kwargs.pop('use_cache', None)
        outputs = self.model(input_ids=input_ids, use_cache=False, **kwargs)
        outputs.logits = outputs.last_hidden_state @ self.embedding.weight.T
        return outputs


def of_class(model: type[LlamaForCausalLM]):
    torch.manual_seed(0)
    return model(LlamaConfig(**networks.GROUPED)).eval()


def check_all_layouts(model, *, learns: bool) -> CausalLanguageModel:
    """Return the language model after its first batch; check what it learned, and its scores in every layout."""
    language_model = CausalLanguageModel(model, device=CPU)
    requests = [*networks.mixed_requests(), *networks.requests_after_a_prefix(4)]
    first_batch = plan(requests, tokens_per_batch=PREFIX_BUDGET, layout=PADDED_ROWS)[0]

    largest, rounding = language_model.learn(first_batch.requests)

    rows = lay_out_rows(first_batch.requests).tokens
    largest_of_rows = [networks.logits_of(model, row).abs().max().item() for row in rows]
    assert largest == pytest.approx(max(largest_of_rows), rel=1e-4)
    assert rounding == 0
    assert (language_model.tail is not None) == learns
    for layout in networks.layouts_of(model):
        batches = plan(requests, tokens_per_batch=PREFIX_BUDGET, layout=layout)
        networks.check_against_bare_forwards(model, requests, networks.run(language_model, batches))
    return language_model


@pytest.mark.parametrize(
    ('name', 'tail'),
    [
        ('llama', lambda logits: logits),
        ('cohere', lambda logits: logits * 0.3),
        ('granite', lambda logits: logits / 3),
        ('gemma2', lambda logits: 2 * torch.tanh(logits / 2)),
    ],
)
def test_scales_and_caps_after_the_output_layer_are_learned(name: str, tail):
    """Mutation: always use `unchanged`."""
    logits = torch.linspace(-5, 5, 50)

    language_model = check_all_layouts(networks.network(name), learns=True)

    torch.testing.assert_close(language_model.tail(logits), tail(logits))


def test_a_cap_is_learned_from_logits_too_small_to_show_it():
    """The function learned from a small model's first step holds later. Mutation: try `unchanged` first."""
    model = networks.network('gemma2', final_logit_softcapping=30.0, initializer_range=0.003)
    (batch,) = plan([networks.request(0, [5, 6, 7], [[8, 9]])], tokens_per_batch=99, layout=PADDED_ROWS)
    language_model = CausalLanguageModel(model, device=CPU)

    language_model.learn(batch.requests)
    with torch.no_grad():
        model.lm_head.weight.mul_(1000)

    networks.check_against_bare_forwards(model, batch.requests, networks.run(language_model, [batch]))


@pytest.mark.parametrize('model', [ScaledAndShifted, ByEmbedding, CutLogits])
def test_unknown_changes_of_logits_are_left_to_the_model(model):
    """Mutation: the last known function if none fits."""
    check_all_layouts(of_class(model), learns=False)


@pytest.mark.parametrize('model', [ScaledAndShifted, ByEmbedding, CutLogits])
def test_the_output_layer_is_that_of_the_model_or_none(model):
    """The embedding that `ByEmbedding` returns is none. Mutation: any module that `get_output_embeddings` returns."""
    network = of_class(model)

    assert output_layer(network) is network.lm_head


def test_logits_of_another_precision_are_left_to_the_model():
    """Under autocast the layer returns bfloat16, and a parameter added to it makes float32."""
    network = of_class(ScaledAndShifted)
    language_model = CausalLanguageModel(network, device=CPU)
    request = networks.request(0, [5, 6, 7], [[8, 9]])
    (batch,) = plan([request], tokens_per_batch=99, layout=PADDED_ROWS)

    with torch.autocast('cpu', torch.bfloat16):
        language_model.learn(batch.requests)
        (output,) = language_model.run(batch)
        expected, _ = networks.alone(network, request.contexts[0], request.continuations[0])

    assert language_model.tail is None
    np.testing.assert_allclose(output.logprobs[0], expected, atol=1e-5)


# Sampling.

NUM_TOKENS = 50
GRID = 4000
WITH_BOTH_LIMITS = Sampling(temperature=0.8, top_k=9, top_p=0.8)
SETTINGS = [
    # Temperature alone.
    Sampling(temperature=1.0),
    Sampling(temperature=0.3),
    Sampling(temperature=7.0),
    # The most probable tokens by number: some, one, all, more than all.
    Sampling(temperature=1.0, top_k=5),
    Sampling(temperature=0.7, top_k=1),
    Sampling(temperature=1.5, top_k=NUM_TOKENS),
    Sampling(temperature=1.5, top_k=1000),
    # The most probable tokens by probability; 0 leaves one.
    Sampling(temperature=1.0, top_p=0.9),
    Sampling(temperature=2.0, top_p=0.5),
    Sampling(temperature=1.0, top_p=0.0),
    # By both.
    WITH_BOTH_LIMITS,
    Sampling(temperature=3.0, top_k=20, top_p=0.3),
]


def random_logits(rows: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return 3 * torch.randn(rows, NUM_TOKENS, generator=generator)


def probabilities(logits: torch.Tensor, sampling: Sampling) -> np.ndarray:
    """Return the distribution transformers samples from, with processors in the order of its `generate`."""
    scores = TemperatureLogitsWarper(sampling.temperature)(None, logits.double())
    if sampling.top_k > 0:
        scores = TopKLogitsWarper(sampling.top_k)(None, scores)
    if sampling.top_p < 1:
        scores = TopPLogitsWarper(sampling.top_p)(None, scores)
    return scores.softmax(dim=-1).numpy()


def shares(logits: torch.Tensor, sampling: Sampling) -> np.ndarray:
    """Return the share of numbers from 0 to 1 that select each token."""
    draws = ((np.arange(GRID) + 0.5) / GRID).tolist()
    tokens = draw_tokens(logits.expand(GRID, -1), sampling, draws).tolist()
    return np.bincount(tokens, minlength=logits.shape[-1]) / GRID


@pytest.mark.parametrize('sampling', SETTINGS, ids=str)
def test_tokens_are_drawn_with_their_probabilities(sampling: Sampling):
    """The grid is as fine as the tolerance, so nothing is left to chance.

    Mutations: the temperature after `top_p`; `top_p` before `top_k`; a token too few in `top_p`; no `gather`.
    """
    for logits in random_logits(3):
        expected = probabilities(logits[None], sampling)[0]

        drawn = shares(logits[None], sampling)

        np.testing.assert_allclose(drawn, expected, rtol=0, atol=1.001 / GRID)
        assert (drawn[expected == 0] == 0).all()


@pytest.mark.parametrize(
    ('draw', 'token'),
    [
        # A bound belongs to the next token.
        (0.0, 0),
        (0.2499, 0),
        (0.25, 1),
        (0.4999, 1),
        (0.5, 2),
        (0.75, 3),
        (1 - 2**-53, 3),
    ],
)
def test_without_limits_equal_tokens_share_the_draws_in_the_order_of_the_vocabulary(draw: float, token: int):
    """Mutation: `right=False`."""
    assert draw_tokens(torch.zeros(1, 4), Sampling(temperature=1.0), [draw]).tolist() == [token]


@pytest.mark.parametrize(
    ('draw', 'token'),
    [
        # The bounds are 5/8 and 6/8.
        (0.624, 0),
        (0.626, 1),
        (0.749, 1),
        (0.751, 2),
    ],
)
def test_without_limits_tokens_have_their_shares_in_the_order_of_the_vocabulary(draw: float, token: int):
    logits = torch.tensor([[5.0, 1.0, 2.0]]).log()

    assert draw_tokens(logits, Sampling(temperature=1.0), [draw]).tolist() == [token]


@pytest.mark.parametrize('draw', [0.0, 2**-53, 1 - 2**-53])
@pytest.mark.parametrize('sampling', SETTINGS, ids=str)
def test_extreme_draws_pick_possible_tokens(sampling: Sampling, draw: float):
    """Tokens of probability 0 are first, last and in between. Mutation: `right=False`: the first token for 0."""
    logits = random_logits(20)
    logits[:, [0, 1, 7, NUM_TOKENS - 2, NUM_TOKENS - 1]] = -torch.inf

    tokens = draw_tokens(logits, sampling, [draw] * len(logits)).tolist()

    probabilities_of_drawn = probabilities(logits, sampling)[np.arange(len(logits)), tokens]
    assert (probabilities_of_drawn > 0).all()


def test_top_k_keeps_exactly_k_tokens_with_ties():
    """Logits in half precision often tie; transformers keeps all that tie with the last."""
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 2.0, 0.0]])

    drawn = shares(logits, Sampling(temperature=1.0, top_k=3))

    total = np.exp(3) + 2 * np.exp(2)
    top = np.exp(3) / total
    tied = np.exp(2) / total
    assert (drawn > 0).sum() == 3
    np.testing.assert_allclose(np.sort(drawn)[-3:], [tied, tied, top], atol=1.001 / GRID)


@pytest.mark.parametrize(
    ('top_p', 'weights'),
    [
        # The half and the first two equal ones make up 0.75.
        (0.74, [1, 1, 4, 0, 0]),
        (0.76, [1, 1, 4, 1, 0]),
    ],
)
def test_top_p_keeps_the_first_of_equal_tokens(top_p: float, weights: list[int]):
    """Of probabilities of 1/8, four times, and 1/2."""
    logits = torch.tensor([[1.0, 1.0, 4.0, 1.0, 1.0]]).log()

    drawn = shares(logits, Sampling(temperature=1.0, top_p=top_p))

    np.testing.assert_allclose(drawn, np.array(weights) / sum(weights), atol=1.001 / GRID)


def test_greedy_picks_the_first_of_equal_tokens():
    """At temperature 0 with any other settings."""
    logits = torch.tensor([[1.0, 5.0, 5.0], [7.0, 7.0, 7.0], [0.0, 1.0, 2.0]])
    samplings = [Sampling(), Sampling(top_k=2), Sampling(top_p=0.1)]

    tokens = next_tokens(logits, samplings, [None, None, None])

    assert tokens == [1, 0, 2]


def test_rows_are_sampled_independently():
    """Mutations: draws by their place in the group; the first row's settings for all."""
    samplings = [Sampling(), *SETTINGS] * 4
    logits = random_logits(len(samplings))
    all_draws = np.linspace(0, 0.99, 52)
    assert len(samplings) == len(all_draws)
    # Greedy rows have no draw.
    draws = [None if sampling.temperature == 0 else all_draws[row] for row, sampling in enumerate(samplings)]

    together = next_tokens(logits, samplings, draws)

    alone = []
    for row, sampling in enumerate(samplings):
        alone += next_tokens(logits[row : row + 1], [sampling], [draws[row]])
    assert together == alone
    assert len(set(alone)) > 10


def test_non_finite_logits_do_not_affect_other_rows():
    """Mutation: no `minimum`."""
    samplings = [WITH_BOTH_LIMITS] * 3
    draws = [0.3, 0.4, 0.5]
    logits = random_logits(3)
    of_finite_rows = next_tokens(logits, samplings, draws)
    logits[1] = torch.nan

    tokens = next_tokens(logits, samplings, draws)

    assert tokens[0] == of_finite_rows[0]
    assert tokens[2] == of_finite_rows[2]
    assert 0 <= tokens[1] < NUM_TOKENS
