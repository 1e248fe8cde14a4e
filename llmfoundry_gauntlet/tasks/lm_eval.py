"""Tasks and groups of the LM Evaluation Harness: its prompts, tokenization, filters, metrics and averages.

An item is a document, its request holds the requests that the task makes of it. docs/tasks.md has the YAML keys.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, ClassVar

from llmfoundry_gauntlet.data.examples import TaskRows, row_cluster, row_digest
from llmfoundry_gauntlet.data.hugging_face import to_json_types
from llmfoundry_gauntlet.errors import ConfigError, suggestion
from llmfoundry_gauntlet.metrics.metrics import Metric
from llmfoundry_gauntlet.scoring.text import NON_FINITE_GENERATION
from llmfoundry_gauntlet.tasks.base import TRUNCATED_REASON, Task
from llmfoundry_gauntlet.tasks.lm_eval_requests import (
    GenerationSettings,
    answers_of,
    generate_request,
    generated_text,
    generation_settings,
    score_request,
)
from llmfoundry_gauntlet.tasks.lm_eval_scores import is_share, measured, metrics_of_group, metrics_of_task, score_of
from llmfoundry_gauntlet.tasks.lm_eval_source import (
    GENERATE,
    MULTIPLE_CHOICE,
    ROLLING,
    Chat,
    Document,
    Loaded,
    Subtask,
    described_task,
    load,
    own_shots,
)
from llmfoundry_gauntlet.tasks.lm_eval_tokens import TokenizingLM
from llmfoundry_gauntlet.types import (
    Example,
    GenerateRequest,
    Generation,
    ItemResult,
    Prompt,
    Request,
    Score,
    ScoreOutput,
    ScoreRequest,
    StopRule,
)

if TYPE_CHECKING:
    from llmfoundry_gauntlet.tasks.encode import Encoder
    from llmfoundry_gauntlet.tasks.truncate import EncodedItem

SCHEME = 'lm-eval://'
NON_FINITE = 'non-finite log-probability'
# Keys of other types of tasks that have no meaning here, as lm-eval's YAML says all that they do.
NOT_USED = (
    'prompt_string',
    'example_delimiter',
    'continuation_delimiter',
    'prelimiter',
    'has_categories',
    'strip_dataset',
    'context_key',
    'answer_key',
    'cluster_key',
    'hf_loading_vars',
    'hf_parsing_map',
    'generation_kwargs',
    'metric_names',
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LmEvalTask(Task):
    """A task of lm-eval, or a group of tasks, each of which is a category.

    `lm_eval_task` is its name or the path of its YAML, `include_path` a folder with YAML files of one's own. Without
    `num_fewshot` the task has its own number of shots. `metric` names the one that composites count, by default the
    first. `lm_eval` is what an evaluation has found out about the task: versions, configurations and metrics.
    """

    type_name: ClassVar[str] = 'lm_eval'
    is_in_llm_foundry: ClassVar[bool] = False
    is_verbatim: ClassVar[bool] = True
    builds_requests: ClassVar[bool] = True

    lm_eval_task: str
    dataset_uri: str = SCHEME
    num_fewshot: tuple[int, ...] = ()
    include_path: str | None = None
    metric: str | None = None
    lm_eval: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.dataset_uri == SCHEME:
            object.__setattr__(self, 'dataset_uri', f'{SCHEME}{Path(self.lm_eval_task).name}')
        if not self.num_fewshot:
            number = own_shots(self.lm_eval_task, self.include_path, self.label)
            object.__setattr__(self, 'num_fewshot', (number,))
        Task.__post_init__(self)

    def problems(self) -> Iterator[str]:
        """Yield a problem, beginning with its key, for each value that is not allowed."""
        yield from Task.problems(self)
        if not self.lm_eval_task.strip():
            yield "lm_eval_task: is empty; give the name of a task or group of lm-eval, or its YAML's path"
        if not self.dataset_uri.startswith(SCHEME):
            yield 'dataset_uri: has no meaning in lm_eval, whose task says where its data is; leave it out'
        for item in NOT_USED:
            if getattr(self, item) != defaults()[item]:
                yield f'{item}: has no meaning in lm_eval, whose task says it itself; leave it out'

    # What is known of the task.

    @property
    def tasks(self) -> Mapping[str, Mapping[str, Any]]:
        """Return the descriptions of its tasks by name; none before it is loaded."""
        tasks: Mapping[str, Mapping[str, Any]] = (self.lm_eval or {}).get('tasks', {})
        return tasks

    @property
    def is_group(self) -> bool:
        """Return whether it is a group or a tag, whose tasks are categories."""
        return not (self.lm_eval or {}).get('is_single', True)

    @property
    def generates(self) -> bool:  # type: ignore[override]  # a group may have tasks that do and tasks that do not
        """Return whether the model generates text for any of its tasks."""
        return any(task['output_type'] == GENERATE for task in self.tasks.values())

    @property
    def has_shots(self) -> bool:
        """Return True: the number of shots is given to lm-eval."""
        return True

    @property
    def has_share(self) -> bool:
        """Return whether the first metric is a share in all tasks that have it."""
        (first, *_) = self.metrics()
        entries = [task['metrics'][first.name] for task in self.tasks.values() if first.name in task['metrics']]
        return bool(entries) and all(map(is_share, entries))

    def metrics(self) -> tuple[Metric, ...]:
        """Return the metrics under lm-eval's names, the one that composites count first; none before it is loaded."""
        if not self.tasks:
            return ()
        if self.is_group:
            metrics = metrics_of_group(self.tasks, (self.lm_eval or {}).get('groups', ()))
        else:
            (only,) = self.tasks.values()
            metrics = metrics_of_task(only)
        return tuple(sorted(metrics, key=lambda metric: metric.name != self.metric))

    def chance(self, results: Sequence[ItemResult]) -> float | None:
        """Return the accuracy of guessing among the choices, the mean over items; None if not all items have them."""
        if any(task['output_type'] != MULTIPLE_CHOICE for task in self.tasks.values()):
            return None
        shares = [1 / len(result.num_characters) for result in results if result.num_characters]
        return fmean(shares) if shares else None

    # Rows.

    def read(self, data_root: str) -> TaskRows:
        """Return all documents, with the task as it is known then. Raise ConfigError or DataError."""
        (num_shots,) = self.num_fewshot
        loaded = load(
            self.lm_eval_task,
            self.include_path,
            num_shots=num_shots,
            seed=self.fewshot_random_seed,
            label=self.label,
        )
        known = replace(self, lm_eval=self._described(loaded))
        names = [metric.name for metric in known.metrics()]
        if self.metric is not None and self.metric not in names:
            raise ConfigError(f'{self.label}: metric: is {self.metric!r}{suggestion(self.metric, names)}')
        examples = [example for subtask in loaded.subtasks for example in self._examples(subtask, loaded)]
        return TaskRows(examples=examples, warnings=tuple(self._warnings(loaded)), task=known)

    def _described(self, loaded: Loaded) -> dict[str, Any]:
        tasks = {}
        for subtask in loaded.subtasks:
            try:
                metrics = measured(subtask)
            except ConfigError as error:
                raise ConfigError([f'{self.label}: {problem}' for problem in error.problems]) from error
            tasks[subtask.name] = {**described_task(subtask), 'metrics': metrics}
        return {
            'lm_eval_version': version('lm-eval'),
            'is_single': loaded.is_single,
            'groups': list(loaded.groups),
            'tasks': tasks,
        }

    def _examples(self, subtask: Subtask, loaded: Loaded) -> Iterator[Example]:
        name = None if loaded.is_single else subtask.name
        for doc_id, doc in enumerate(subtask.docs):
            row = to_json_types(doc)
            columns = row if isinstance(row, dict) else {'doc': row}
            yield Example(
                row=doc_id,
                content=Document(subtask, doc_id),
                category=name,
                file=name,
                digest=row_digest(columns),
                cluster=row_cluster(subtask.name, columns),
            )

    def _warnings(self, loaded: Loaded) -> Iterator[str]:
        (num_shots,) = self.num_fewshot
        for subtask in loaded.subtasks:
            if subtask.num_shots != num_shots:
                yield (
                    f'{self.key}: the task {subtask.name} of lm-eval says num_fewshot: {subtask.num_shots}, which stays'
                )

    # Requests.

    def chat(self, lm: TokenizingLM, encoder: Encoder) -> Chat | None:
        """Return the chat of prompts; None if they are sent in none."""
        if not self.apply_chat_template:
            return None
        settings = [encoder.fingerprint, encoder.chat_template, repr(self.chat_format)]
        return Chat(
            name=hashlib.sha256(repr(settings).encode('utf-8', 'surrogatepass')).hexdigest(),
            system_instruction=self.chat_format.system_prompt,
            shots_as_turns=self.chat_format.shots_as_turns,
            render=lm.render,
        )

    def tokenizing(self, encoder: Encoder, max_seq_len: int) -> TokenizingLM:
        """Return lm-eval's tokenization with this tokenizer."""
        return tokenizing_lm(encoder, max_seq_len, json.dumps(self.chat_format.template_kwargs))

    def texts_of_requests(self, examples: Sequence[Example], encoder: Encoder) -> Iterable[Any]:
        """Yield the texts of all requests of each document."""
        chat = self.chat(self.tokenizing(encoder, 1), encoder)
        for example in examples:
            instances = document_of(example).subtask.instances(chat)[example.row]
            yield example.file, example.row, [(instance.request_type, instance.args) for instance in instances]

    def encoded_items(self, examples: Sequence[Example], encoder: Encoder, *, max_seq_len: int) -> list[EncodedItem]:
        """Return the token ids of documents, as lm-eval's Hugging Face backend makes them."""
        lm = self.tokenizing(encoder, max_seq_len)
        chat = self.chat(lm, encoder)
        return [self._encoded(example, lm, chat, max_seq_len) for example in examples]

    def _encoded(self, example: Example, lm: TokenizingLM, chat: Chat | None, max_seq_len: int) -> EncodedItem:
        from llmfoundry_gauntlet.tasks.truncate import EncodedItem, shots_left  # late: reading YAML needs no numpy

        document = document_of(example)
        subtask = document.subtask
        instances = subtask.instances(chat)[document.doc_id]
        kinds = {instance.request_type for instance in instances}
        is_generated = kinds == {GENERATE}
        if len(kinds) > 1 or (len(instances) > 1 and kinds & {GENERATE, ROLLING}):
            raise ConfigError(
                f'{self.label}: {subtask.name} of lm-eval: has {len(instances)} requests of the types '
                f'{", ".join(sorted(kinds))} for a document; allowed: any number of loglikelihood, or one of another '
                'type'
            )
        prompt = prompt_of(instances, subtask.num_shots)
        if is_generated:
            settings = self._settings(document, lm.end_text)
            whole = [lm.context(instances[0].args[0])]
            request: Any = self._generation(example, whole[0], settings, lm, max_seq_len)
            contexts, continuations = (request.context,), ()
            max_new_tokens = settings.max_new_tokens
        else:
            pairs = lm.pairs(instances)
            whole = [list(context) for context, _ in pairs]
            request = score_request(self.item_key(example), pairs, max_length=max_seq_len)
            contexts, continuations = request.contexts, request.continuations
            max_new_tokens = 0
        num_dropped = max(len(ids) - len(kept) for ids, kept in zip(whole, contexts, strict=True))
        return EncodedItem(
            contexts=contexts,
            continuations=continuations,
            prompt_sha256=prompt.sha256,
            num_shots=shots_left(prompt, max(map(len, whole)), num_dropped),
            prompt_shortened=request.prompt_shortened,
            max_new_tokens=max_new_tokens,
        )

    def request(self, example: Example, encoded: EncodedItem, encoder: Encoder, *, max_seq_len: int) -> Request:
        """Return the request of a document."""
        if encoded.continuations:
            return ScoreRequest(
                key=self.item_key(example),
                contexts=encoded.contexts,
                continuations=encoded.continuations,
                prompt_shortened=encoded.prompt_shortened,
            )
        lm = self.tokenizing(encoder, max_seq_len)
        document = document_of(example)
        document.subtask.end_text = lm.end_text
        settings = self._settings(document, lm.end_text)
        generation = self._generation(example, encoded.contexts[0].tolist(), settings, lm, max_seq_len)
        return replace(generation, prompt_shortened=encoded.prompt_shortened)

    def _settings(self, document: Document, end_text: str | None) -> GenerationSettings:
        subtask = document.subtask
        (instance,) = self._latest(subtask)[document.doc_id]
        settings = generation_settings(instance.args[1], end_text=end_text, seed=self.fewshot_random_seed)
        if settings.unsupported is not None:
            raise ConfigError(
                f'{self.label}: {subtask.name} of lm-eval: generates with {settings.unsupported}, which is not '
                'supported'
            )
        return settings

    def _generation(
        self, example: Example, context: Sequence[int], settings: GenerationSettings, lm: TokenizingLM, max_seq_len: int
    ) -> GenerateRequest:
        return generate_request(
            self.item_key(example),
            context,
            settings,
            max_length=max_seq_len,
            num_tokens_of=lm.num_tokens,
            think_end_token=self.think_end_token,
        )

    @property
    def think_end_token(self) -> str | None:
        """Return the end of reasoning, lm-eval's model argument; None if the settings name none."""
        return self.markers[0].end if self.markers else None

    def _latest(self, subtask: Subtask) -> list[list[Any]]:
        return subtask.latest_instances(
            self.chat_format.system_prompt,
            in_chat=self.apply_chat_template,
            as_turns=self.chat_format.shots_as_turns,
        )

    # Prompts, to be shown.

    def examples_with_shots(
        self, examples: Sequence[Example], asked: Sequence[Example]
    ) -> Iterator[tuple[Example, tuple[Example, ...]]]:
        """Yield the `asked` examples; their shots are in their prompts already."""
        return ((example, ()) for example in asked)

    def prompt(self, example: Example, shots: Sequence[Example] = ()) -> Prompt:
        """Return the prompt of a document, with its shots."""
        return self.ask(example.content, True)

    def ask(self, content: Document, first: bool) -> Prompt:
        """Return the prompt of a document, with its shots."""
        return prompt_of(self._latest(content.subtask)[content.doc_id], content.subtask.num_shots)

    def own_stops(self, stops: StopRule, content: Document) -> StopRule:
        """Return the strings that end the generation of a document; what ends it here also has the tokenizer's."""
        if content.subtask.task.OUTPUT_TYPE != GENERATE:
            return stops
        settings = self._settings(content, None)
        return StopRule(strings=tuple(text for text in settings.until if text))

    def max_new_tokens_of(self, content: Document) -> int:
        """Return the token limit of the generation of a document; 0 if it is scored by likelihood."""
        if content.subtask.task.OUTPUT_TYPE != GENERATE:
            return 0
        return self._settings(content, None).max_new_tokens

    def reasoning(self, prompt: str = '') -> None:
        """Return None: lm-eval knows reasoning by its end alone, which `score` looks for."""
        return None

    @property
    def setting_of_default_limit(self) -> str:
        """Return the key of lm-eval's YAML that sets the token limit."""
        return "max_gen_toks in the task's generation_kwargs"

    def own_questions(self, examples: Sequence[Example], asked: Sequence[Example]) -> list[Example]:
        """Return none: lm-eval draws the shots."""
        return []

    def choices(self, content: Document) -> tuple[str, ...]:
        """Return the texts of the choices of a document; none if it has one continuation, or a generation."""
        if not content.subtask.has_choices:
            return ()
        instances = self._latest(content.subtask)[content.doc_id]
        texts = [instance.args[1] for instance in instances]
        # With acc_mutual_info each choice is scored a second time, after nothing.
        is_scored_twice = 'acc_mutual_info' in content.subtask.task.aggregation()
        return tuple(texts[: len(texts) // 2] if is_scored_twice else texts)

    def num_samples_of(self, content: Document) -> int:
        """Return the number of sampled generations of a document: the task's repeats."""
        subtask = content.subtask
        if subtask.repeats == 1 or subtask.task.OUTPUT_TYPE != GENERATE:
            return 1
        settings = self._settings(content, None)
        # Without sampling all repeats are the same.
        return subtask.repeats if settings.sampling.temperature > 0 else 1

    # Scores.

    def score(self, output: Any, content: Document) -> Score:
        """Score a document by the task's own filters and metrics; the score is the first metric, if it is a share."""
        if isinstance(output, ScoreOutput):
            return self._score_of_likelihoods(output, content)
        return self._score_of_generation(output, content)

    def _score_of_likelihoods(self, output: ScoreOutput, content: Document) -> Score:
        subtask = content.subtask
        answers = answers_of(output)
        logprobs = [logprob for logprob, _ in answers]
        if not all(logprob == logprob and logprob > float('-inf') for logprob in logprobs):
            return Score.unscored(NON_FINITE)
        responses: list[Any] = [sum(logprobs)] if subtask.task.OUTPUT_TYPE == ROLLING else answers
        score = score_of(
            subtask, content.doc_id, [[response] * subtask.repeats for response in responses], metric=self._first
        )
        if not subtask.has_choices or score.value is None:
            return score
        of_choices = logprobs[: len(self.choices(content))]
        return replace(score, predicted=of_choices.index(max(of_choices)))

    def _score_of_generation(self, output: Generation, content: Document) -> Score:
        if not output.is_finite:
            return Score.unscored(NON_FINITE_GENERATION)
        subtask = content.subtask
        settings = self._settings(content, subtask.end_text)
        text = generated_text(output.text, settings, self.think_end_token)
        reason = TRUNCATED_REASON if output.is_truncated else None
        if self.num_samples_of(content) > 1:
            return Score(value=0.0, answer=text, reason=reason)  # `completed` scores all generations together
        score = score_of(subtask, content.doc_id, [[text] * subtask.repeats], metric=self._first)
        return score if score.value is None else replace(score, answer=text, reason=reason)

    @property
    def _first(self) -> str:
        (first, *_) = self.metrics()
        return first.name

    def completed(self, results: Sequence[ItemResult], contents: Sequence[Document]) -> Sequence[ItemResult]:
        """Return the results with the score of all repeats of a document, which its filters reduce, at each of them."""
        repeats: dict[tuple[str | None, int], list[int]] = {}
        for place, (result, content) in enumerate(zip(results, contents, strict=True)):
            if self.num_samples_of(content) > 1:
                repeats.setdefault((result.key.file, result.key.row), []).append(place)
        completed = list(results)
        for places in repeats.values():
            of_document = [results[place] for place in places]
            content = contents[places[0]]
            unscored = [result for result in of_document if result.score is None]
            if unscored:
                score = Score.unscored(str(unscored[0].reason))
            else:
                texts = [str(result.answer) for result in of_document]
                score = score_of(content.subtask, content.doc_id, [texts], metric=self._first)
            for place, result in zip(places, of_document, strict=True):
                completed[place] = replace(
                    result,
                    score=score.value,
                    metrics=score.metrics,
                    facts=score.facts,
                    reason=result.reason if score.value is not None else score.reason,
                )
        return completed


@functools.lru_cache(maxsize=1)  # as each has a copy of the tokenizer
def tokenizing_lm(encoder: Encoder, max_seq_len: int, template_kwargs: str) -> TokenizingLM:
    """Return lm-eval's tokenization with a tokenizer; `template_kwargs` are in JSON."""
    return TokenizingLM(encoder.tokenizer, max_length=max_seq_len, template_kwargs=json.loads(template_kwargs))


def document_of(example: Example) -> Document:
    """Return the document of an example."""
    assert isinstance(example.content, Document)
    return example.content


def prompt_of(instances: Sequence[Any], num_shots: int) -> Prompt:
    """Return the requests of a document as a prompt, as it is sent: nothing is added to its texts."""
    as_it_is: dict[str, Any] = {'num_shots': num_shots, 'chat_template': False, 'as_reference': True}
    if instances[0].request_type == ROLLING:
        return Prompt(contexts=('',), continuations=(instances[0].args[0],), **as_it_is)
    contexts = tuple(instance.args[0] for instance in instances)
    if len(set(contexts)) == 1:
        contexts = contexts[:1]
    if instances[0].request_type == GENERATE:
        return Prompt(contexts=contexts, **as_it_is)
    return Prompt(contexts=contexts, continuations=tuple(instance.args[1] for instance in instances), **as_it_is)


def defaults() -> dict[str, Any]:
    """Return the defaults of the keys of tasks."""
    return {item.name: item.default for item in fields(Task)}
