"""What the likelihood suite times, and what it is to reach."""

from __future__ import annotations

from dataclasses import dataclass

CONTENDERS = ('ours', 'bare_forward', 'llm_foundry', 'lm_eval')  # in the order of a round
VOCABULARIES = (8_000, 50_000)
LM_EVAL_BATCH_SIZES = (8, 16, 32)  # the best of them counts
TOKENS_PER_FOUNDRY_BATCH = 4096
POOL_ROWS = 2000


@dataclass(frozen=True, slots=True)
class Group:
    """Rows of one kind of work, and the targets of its geometric means.

    The targets are llm-foundry / ours (at least), lm-eval / ours (at least), ours / bare forward (at most).
    """

    name: str
    targets: tuple[float, float, float]


ZERO_SHOT = Group('0-shot multiple choice', (50, 1.5, 1.10))
FOUR_TEXTS = Group('3 to 10 shots, 4 text choices', (15, 3.5, 1.05))
TWO_CHOICES = Group('3 to 10 shots, 2 choices', (7, 2.2, 1.05))
LETTERS = Group('letters as choices', (10, 1.5, 1.05))
OWN_CONTEXTS = Group('language modelling, own contexts', (20, 1.1, 1.10))
FULL_CONTEXTS = Group('the same, filling max_seq_len', (3, 1.1, 1.10))
SHARED_PASSAGES = Group('shared passages', (50, 5, 1.05))
GROUPS = (ZERO_SHOT, FOUR_TEXTS, TWO_CHOICES, LETTERS, OWN_CONTEXTS, FULL_CONTEXTS, SHARED_PASSAGES)
WHOLE_SUITE = Group('geometric mean of the suite', (25, 2, 1.05))


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One task at one number of shots: the first `items` rows of its file are asked.

    llm-foundry runs the first `foundry_items` of them alone: it pads all items to `max_seq_len`, so each costs the
    same. The pairs are (full, quick). `category` keeps the rows of one category. Shots come from the first
    POOL_ROWS rows: from a small pool they would be the same again and again, and prompts would begin alike.
    """

    label: str
    num_shots: int
    group: Group
    items: tuple[int, int]
    foundry_items: tuple[int, int]
    max_seq_len: int = 1024
    category: str | None = None

    @property
    def name(self) -> str:
        """'{label}/{n}-shot', as in metric keys."""
        return f'{self.label}/{self.num_shots}-shot'

    @property
    def foundry_batch_size(self) -> int:
        """Sequences in a batch of llm-foundry."""
        return TOKENS_PER_FOUNDRY_BATCH // self.max_seq_len


ROWS = (
    Row(label='copa', num_shots=0, group=ZERO_SHOT, items=(100, 60), foundry_items=(4, 2)),
    Row(label='piqa', num_shots=0, group=ZERO_SHOT, items=(96, 32), foundry_items=(4, 2)),
    Row(label='hellaswag', num_shots=0, group=ZERO_SHOT, items=(48, 16), foundry_items=(2, 1)),
    Row(label='winograd', num_shots=0, group=ZERO_SHOT, items=(273, 64), foundry_items=(4, 2)),
    Row(label='arc_challenge', num_shots=3, group=FOUR_TEXTS, items=(16, 6), foundry_items=(2, 1)),
    Row(label='arc_challenge', num_shots=10, group=FOUR_TEXTS, items=(10, 6), foundry_items=(2, 1)),
    Row(label='piqa', num_shots=10, group=TWO_CHOICES, items=(12, 6), foundry_items=(4, 2)),
    Row(label='winograd', num_shots=3, group=TWO_CHOICES, items=(96, 32), foundry_items=(4, 2)),
    Row(label='mmlu', num_shots=5, group=LETTERS, items=(16, 6), foundry_items=(2, 1), category='nutrition'),
    Row(label='lambada_openai', num_shots=0, group=OWN_CONTEXTS, items=(128, 32), foundry_items=(4, 4)),
    Row(label='squad', num_shots=10, group=FULL_CONTEXTS, items=(8, 3), foundry_items=(2, 1), max_seq_len=2048),
    Row(label='coqa', num_shots=0, group=SHARED_PASSAGES, items=(48, 24), foundry_items=(2, 2), max_seq_len=2048),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much is run: rounds by contender, vocabularies, and which of every row's pairs."""

    quick: bool
    vocabularies: tuple[int, ...]
    rounds: dict[str, int]

    def num_items(self, row: Row, contender: str) -> int:
        """Items of a row that a contender runs, where the file has as many."""
        return (row.foundry_items if contender == 'llm_foundry' else row.items)[self.quick]


FULL = Effort(
    quick=False,
    vocabularies=VOCABULARIES,
    rounds={'ours': 3, 'bare_forward': 3, 'llm_foundry': 2, 'lm_eval': 3},
)
QUICK = Effort(
    quick=True,
    vocabularies=VOCABULARIES[-1:],
    rounds={'ours': 3, 'bare_forward': 3, 'llm_foundry': 1, 'lm_eval': 1},
)
