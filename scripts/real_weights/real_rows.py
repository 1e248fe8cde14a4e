"""The work of `make real`: tasks on which evaluations are compared item by item, and tasks with published scores."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

SMOLLM2, GEMMA3 = 'smollm2', 'gemma3'


@dataclass(frozen=True, slots=True, kw_only=True)
class AgreementRow:
    """A task whose first items our evaluation, lm-eval and llm-foundry all run.

    llm-foundry pads all items to `foundry_length` tokens, which is chosen to hold them, as each costs its padding.
    With `stops` and `max_new_tokens` answers are generated.
    """

    model: str
    label: str
    num_shots: int
    items: int
    foundry_items: int = 0
    foundry_length: int = 0
    stops: tuple[str, ...] = ()
    max_new_tokens: int | None = None

    @property
    def name(self) -> str:
        """'{label}/{n}-shot'."""
        return f'{self.label}/{self.num_shots}-shot'

    @property
    def key(self) -> str:
        """The name of its results, '{model}/{label}/{n}-shot'."""
        return f'{self.model}/{self.name}'


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A published score, and the task that measures it here.

    `score` of choices: 'sum' is the most probable choice as a whole, 'per_character' by its mean per character; lm-eval
    calls them acc and acc_norm. 'accuracy' is our task's own. Of the contexts of rows, `words` are replaced by others.
    """

    model: str
    label: str
    percent: float
    form: str
    score: str
    source: str
    num_shots: int = 0
    delimiter: str | None = None
    words: tuple[tuple[str, str], ...] = ()
    blank_line_between_shots: bool = False


# Choices of few tokens, as lm-eval runs the context again for each.
AGREEMENT_ROWS = (
    AgreementRow(model=SMOLLM2, label='copa', num_shots=0, items=100, foundry_items=40, foundry_length=64),
    AgreementRow(model=SMOLLM2, label='piqa', num_shots=0, items=80, foundry_items=10, foundry_length=256),
    AgreementRow(
        model=SMOLLM2,
        label='triviaqa_sm_sub',
        num_shots=3,
        items=36,
        foundry_items=8,
        foundry_length=512,
        stops=('\n',),
        max_new_tokens=20,
    ),
    AgreementRow(model=SMOLLM2, label='openbook_qa', num_shots=0, items=160, foundry_items=10, foundry_length=128),
    AgreementRow(model=SMOLLM2, label='winograd', num_shots=0, items=150, foundry_items=40, foundry_length=64),
    AgreementRow(model=SMOLLM2, label='arc_easy', num_shots=0, items=80, foundry_items=8, foundry_length=256),
    AgreementRow(model=SMOLLM2, label='lambada_openai', num_shots=0, items=50, foundry_items=20, foundry_length=256),
    AgreementRow(model=SMOLLM2, label='hellaswag', num_shots=0, items=20, foundry_items=2, foundry_length=256),
    AgreementRow(model=SMOLLM2, label='gsm8k', num_shots=3, items=16, stops=('\nQ: ',), max_new_tokens=64),
    AgreementRow(model=SMOLLM2, label='arc_challenge', num_shots=3, items=8, foundry_items=2, foundry_length=512),
    AgreementRow(model=GEMMA3, label='copa', num_shots=0, items=100, foundry_items=10, foundry_length=64),
    AgreementRow(model=GEMMA3, label='openbook_qa', num_shots=0, items=60),
    AgreementRow(
        model=GEMMA3,
        label='triviaqa_sm_sub',
        num_shots=3,
        items=8,
        stops=('\n',),
        max_new_tokens=20,
    ),
)

# lm-eval's tables of the model before its author trained it further, and the table of Google's model card.
OF_SMOLLM2 = 'https://huggingface.co/lldois/SmolLM2-135M-Reasoning-SLERP-Champion (column Baseline)'
OF_GEMMA3 = 'https://ai.google.dev/gemma/docs/core/model_card_3 (Gemma 3 PT 270M)'

GAUNTLETS, LM_EVALS = "the Gauntlet's", "lm-eval's"
Q_AND_A = 'Q: and A:, a blank line between shots'
Q_AND_A_WORDS = (('Question: ', 'Q: '), ('\nAnswer:', '\nA:'))
LINE = '\nAnswer: '  # lm-eval's prompts end so, and the Gauntlet's: without shots both are the same

published_for_smollm2 = partial(Published, model=SMOLLM2, source=OF_SMOLLM2, form=LM_EVALS)
published_for_gemma3 = partial(Published, model=GEMMA3, source=OF_GEMMA3)

PUBLISHED = (
    published_for_smollm2(label='piqa', percent=66.92, score='per_character', delimiter=LINE),
    published_for_smollm2(label='arc_easy', percent=54.12, score='sum', delimiter=LINE),
    published_for_smollm2(label='arc_challenge', percent=27.73, score='per_character', delimiter=LINE),
    published_for_smollm2(label='hellaswag', percent=42.99, score='per_character'),
    published_for_gemma3(label='piqa', percent=67.7, form=LM_EVALS, score='sum', delimiter=LINE),
    published_for_gemma3(label='arc_easy', percent=57.7, form=LM_EVALS, score='sum', delimiter=LINE),
    published_for_gemma3(label='boolq', percent=61.4, form=GAUNTLETS, score='sum', delimiter=LINE),
    published_for_gemma3(label='triviaqa_sm_sub', percent=15.4, form=GAUNTLETS, score='accuracy', num_shots=5),
    published_for_gemma3(
        label='triviaqa_sm_sub',
        percent=15.4,
        form=Q_AND_A,
        score='accuracy',
        num_shots=5,
        words=Q_AND_A_WORDS,
        blank_line_between_shots=True,
    ),
)
