import numpy as np
import pytest

torch = pytest.importorskip('torch')
import transformers as hf  # noqa: E402

from llmfoundry_gauntlet.engine.language_model import CausalLanguageModel  # noqa: E402
from llmfoundry_gauntlet.engine.plan import plan  # noqa: E402
from llmfoundry_gauntlet.values import ItemKey, ScoreRequest  # noqa: E402

SMALL = {'hidden_size': 32, 'num_hidden_layers': 2, 'num_attention_heads': 4, 'vocab_size': 100}
MODELS = {
    'llama': lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL, intermediate_size=64)),
    'gpt2': lambda: hf.GPT2LMHeadModel(hf.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=100)),
    'bloom': lambda: hf.BloomForCausalLM(hf.BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=100)),
    'mpt': lambda: hf.MptForCausalLM(hf.MptConfig(d_model=32, n_layers=2, n_heads=4, vocab_size=100)),
    'opt': lambda: hf.OPTForCausalLM(hf.OPTConfig(**SMALL, ffn_dim=64, word_embed_proj_dim=32)),
    # these two scale their logits or cap them after the output layer
    'gemma2': lambda: hf.Gemma2ForCausalLM(
        hf.Gemma2Config(**SMALL, intermediate_size=64, num_key_value_heads=2, head_dim=8, final_logit_softcapping=2.0)
    ),
    'cohere': lambda: hf.CohereForCausalLM(hf.CohereConfig(**SMALL, intermediate_size=64, logit_scale=0.3)),
}


@pytest.fixture(params=MODELS)
def model(request):
    torch.manual_seed(0)
    return MODELS[request.param]().eval()


def make_requests(count: int) -> list[ScoreRequest]:
    rng = np.random.default_rng(0)
    requests = []
    for row in range(count):
        context = rng.integers(0, 90, size=rng.integers(1, 40)).astype(np.int32)
        continuations = tuple(rng.integers(0, 90, size=rng.integers(1, 5)).astype(np.int32) for _ in range(3))
        requests.append(
            ScoreRequest(key=ItemKey('t/0-shot', row), contexts=(context,) * 3, continuations=continuations)
        )
    return requests


def alone(model, context: np.ndarray, continuation: np.ndarray):
    """Log-probabilities and argmax flags of one choice by a bare forward of the whole sequence."""
    ids = torch.from_numpy(np.concatenate([context, continuation])).long()[None]
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, len(context) - 1 : -1].float()
    target = torch.from_numpy(continuation).long()[:, None]
    logprobs = logits.log_softmax(-1).gather(1, target).squeeze(1)
    return logprobs.numpy(), (logits.argmax(-1) == target.squeeze(1)).numpy()


def test_batches_agree_with_one_forward_per_choice(model):
    language_model = CausalLanguageModel(model, device=torch.device('cpu'))
    requests = make_requests(20)
    for batch in plan(requests, tokens_per_batch=256):
        for request, output in zip(batch.requests, language_model.run(batch), strict=True):
            for j, (context, continuation) in enumerate(zip(request.contexts, request.continuations, strict=True)):
                logprobs, is_argmax = alone(model, context, continuation)
                np.testing.assert_allclose(output.logprobs[j], logprobs, atol=5e-6)
                assert output.is_argmax[j].tolist() == is_argmax.tolist()
                assert (output.num_top[j] > 0).tolist() == is_argmax.tolist()


def test_the_output_layer_sees_the_scored_positions_alone(model):
    """No [batch, length, vocabulary] tensor exists."""
    seen = []
    handle = model.get_output_embeddings().register_forward_hook(lambda _, inputs, out: seen.append(out.shape))
    (batch,) = plan(make_requests(3), tokens_per_batch=10_000)
    CausalLanguageModel(model, device=torch.device('cpu')).run(batch)
    handle.remove()
    scored = {
        (read.row, read.start + i)
        for request, reads in zip(batch.requests, batch.reads, strict=True)
        for read, ids in zip(reads, request.continuations, strict=True)
        for i in range(len(ids))
    }
    assert seen == [(1, len(scored), 100)]
    assert len(scored) < batch.num_padded_tokens
    assert not model.get_output_embeddings()._forward_pre_hooks


def test_real_tokens_equal_to_padding_are_seen_unless_the_reference_is_wanted():
    """Fix 2: the reference hides real eos tokens where pad is eos."""
    torch.manual_seed(0)
    model = MODELS['llama']().eval()
    context = np.array([5, 7, 9], dtype=np.int32)
    request = ScoreRequest(
        key=ItemKey('t/0-shot', 0), contexts=(context,), continuations=(np.array([3], dtype=np.int32),)
    )
    (batch,) = plan([request], tokens_per_batch=100)
    device = torch.device('cpu')
    (seen,) = CausalLanguageModel(model, device=device).run(batch)
    (hidden,) = CausalLanguageModel(model, device=device, hidden_token_id=7).run(batch)
    np.testing.assert_allclose(seen.logprobs[0], alone(model, context, request.continuations[0])[0], atol=5e-6)
    assert abs(seen.logprobs[0] - hidden.logprobs[0]).max() > 1e-4


def test_tied_logits_are_counted():
    torch.manual_seed(0)
    model = MODELS['llama']().eval()
    torch.nn.init.zeros_(model.get_output_embeddings().weight)
    request = ScoreRequest(
        key=ItemKey('t/0-shot', 0),
        contexts=(np.array([5], dtype=np.int32),),
        continuations=(np.array([0, 3], dtype=np.int32),),
    )
    (batch,) = plan([request], tokens_per_batch=100)
    (output,) = CausalLanguageModel(model, device=torch.device('cpu')).run(batch)
    assert output.num_top[0].tolist() == [100, 100]
    assert output.is_argmax[0].tolist() == [True, False]
