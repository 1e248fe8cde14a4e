"""llm-foundry's description of a model and its tokenizer, as arguments of `evaluate`; and the notes of a mapping."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from llmfoundry_gauntlet.config.decode import Problems, describe, suggestion
from llmfoundry_gauntlet.errors import ConfigError

KIND = 'hf_causal_lm'
HOW_TO_ANSWER = 'write the requests with gauntlet export, have them answered, and mark them with gauntlet run --outputs'
OTHER_KINDS = {
    'mpt_causal_lm': (
        "is llm-foundry's own class; turn the checkpoint into a Hugging Face folder with its "
        f'scripts/inference/convert_composer_to_hf.py, and give that folder as {KIND}'
    ),
    'hf_t5': 'has an encoder; only decoders are evaluated',
    **dict.fromkeys(
        ('openai_causal_lm', 'openai_chat', 'fmapi_causal_lm', 'fmapi_chat'), f'is an API; {HOW_TO_ANSWER}'
    ),
}
PATH = 'pretrained_model_name_or_path'
USED = ('name', PATH, 'pretrained', 'config_overrides')
WITHOUT_EFFECT = {
    'additional_eval_metrics': 'all metrics of a task are computed',
    'additional_train_metrics': 'nothing is trained',
    'allow_embedding_resizing': 'weights are run as they are',
    'attn_implementation': 'the engine brings its own attention where it can, and has the same scores where not',
    'init_device': 'weights go straight to where they are run',
    'should_save_peft_only': 'nothing is saved',
    'trust_remote_code': "only transformers' own classes are run",
    'use_auth_token': 'the token of `huggingface-cli login`, or HF_TOKEN, is used',
    'use_flash_attention_2': 'the engine brings its own attention where it can, and has the same scores where not',
    'use_train_metrics': 'nothing is trained',
}
REFUSED = {
    'load_in_8bit': "weights are not quantised here, and their scores would be others; leave it out to run 'precision'",
    'peft_config': 'adapters are not applied here; merge them into the weights (merge_and_unload of peft), and give '
    'the folder',
    'pretrained_lora_id_or_path': 'adapters are not applied here; merge them into the weights (merge_and_unload of '
    'peft), and give the folder',
}
TOKENIZER_WITHOUT_EFFECT = {
    'model_max_length': 'max_seq_len says it',
    'padding_side': 'nothing is padded',
    'token': 'the token of `huggingface-cli login`, or HF_TOKEN, is used',
    'truncation_side': "'truncation' says it",
    'trust_remote_code': "only transformers' own classes are run",
    'use_auth_token': 'the token of `huggingface-cli login`, or HF_TOKEN, is used',
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mapped:
    """A file's values in our keys, and what became of llm-foundry's, a line each."""

    values: dict[str, Any]
    lines: tuple[str, ...] = ()


@dataclass(slots=True)
class Notes:
    """The lines and the problems of a mapping as it goes on."""

    problems: Problems
    lines: list[str] = field(default_factory=list)

    def became(self, key: str, value: Any, our_key: str, our_value: Any, remark: str = '') -> None:
        """Notes `key: value -> our_key: our_value`."""
        self.lines.append(f'{key}: {short(value)} -> {our_key}: {short(our_value)}{remark and f" ({remark})"}')

    def no_effect(self, key: str, reason: str) -> None:
        """Notes a key that changes nothing."""
        self.lines.append(f'{key}: {reason}' if reason.startswith('no effect') else f'{key}: no effect: {reason}')

    def mapped(self, values: dict[str, Any]) -> Mapped:
        """Return these values with the lines. Raise ConfigError with every problem noted."""
        self.check()
        return Mapped(values=values, lines=tuple(self.lines))

    def check(self) -> None:
        """Raise ConfigError with every problem noted, if there is one."""
        if self.problems.found:
            raise ConfigError(self.problems.found)


def model_arguments(entry: Mapping[str, Any], path: str, notes: Notes) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what `evaluate` is given for an entry with `model`, `tokenizer` and `load_path`; and its config_overrides.

    What is wrong and keys that change nothing go to `notes`.
    """
    model, tokenizer = (mapping(entry.get(key), f'{path}.{key}', notes.problems) for key in ('model', 'tokenizer'))
    arguments: dict[str, Any] = {}
    overrides: dict[str, Any] = {}
    if isinstance(entry.get('model'), Mapping) and check_kind(model.get('name'), f'{path}.model', notes.problems):
        if isinstance(entry.get('tokenizer'), Mapping):
            arguments['tokenizer'] = tokenizer_name(tokenizer, f'{path}.tokenizer', notes)
        check_keys(model, f'{path}.model', notes)
        overrides = mapping(model.get('config_overrides'), f'{path}.model.config_overrides', notes.problems)
        name, checkpoint = model.get(PATH), entry.get('load_path')
        check_text(name, f'{path}.model.{PATH}', notes.problems)
        if name is None:
            notes.problems.add(f'{path}.model', f"the key '{PATH}' is missing")
        elif checkpoint is None and model.get('pretrained') is False:
            notes.problems.add(
                f'{path}.model.pretrained', 'is false: the weights would be random; give load_path, a checkpoint'
            )
        arguments['model'] = name if checkpoint is None else checkpoint
        if checkpoint is not None or overrides:
            arguments['model_config'] = name
    return arguments, overrides


def check_kind(name: Any, path: str, problems: Problems) -> bool:
    """Return whether it is a kind of model that can be run; where not, what to do is noted."""
    if name == KIND:
        return True
    kinds = [KIND, *OTHER_KINDS]
    if name in OTHER_KINDS:
        problems.add(f'{path}.name', f'{name} {OTHER_KINDS[name]}')
    elif name is None:
        problems.add(path, f"the key 'name' is missing, such as {KIND}")
    else:
        problems.add(f'{path}.name', f'there is no kind of model {name!r}{suggestion(str(name), kinds)}')
    return False


def check_keys(model: Mapping[str, Any], path: str, notes: Notes) -> None:
    """Notes the keys of a model that change nothing, and those that cannot be."""
    known = (*USED, *WITHOUT_EFFECT, *REFUSED)
    for key, value in model.items():
        if key in REFUSED and value:
            notes.problems.add(f'{path}.{key}', f'is {describe(value)}: {REFUSED[key]}')
        elif key in WITHOUT_EFFECT:
            notes.no_effect(f'{path}.{key}', WITHOUT_EFFECT[key])
        elif key not in known:
            notes.problems.add(f'{path}.{key}', f'unknown key{suggestion(str(key), known)}')


def tokenizer_name(tokenizer: Mapping[str, Any], path: str, notes: Notes) -> str | None:
    """The folder or name of a tokenizer; arguments that would change its tokens are problems."""
    for key in tokenizer:
        if key not in ('name', 'kwargs'):
            notes.problems.add(f'{path}.{key}', f'unknown key{suggestion(str(key), ("name", "kwargs"))}')
    for key in mapping(tokenizer.get('kwargs'), f'{path}.kwargs', notes.problems):
        if key in TOKENIZER_WITHOUT_EFFECT:
            notes.no_effect(f'{path}.kwargs.{key}', TOKENIZER_WITHOUT_EFFECT[key])
        elif tokenizer.get('name') != 'tiktoken':
            what = 'save a tokenizer with it (from_pretrained, then save_pretrained), and give that folder'
            notes.problems.add(f'{path}.kwargs.{key}', f'may change tokens, and is not read here; {what}')
    name = tokenizer.get('name')
    if name == 'tiktoken':
        notes.problems.add(
            f'{path}.name', "tiktoken is llm-foundry's own class; give a Hugging Face tokenizer with its tokens"
        )
    elif name is None:
        notes.problems.add(path, f"the key 'name' is missing; found: {', '.join(map(str, tokenizer)) or 'nothing'}")
    check_text(name, f'{path}.name', notes.problems)
    return name if isinstance(name, str) else None


def check_text(value: Any, path: str, problems: Problems) -> None:
    """Note a value that is there and no text, or an empty one."""
    if value is not None and not (isinstance(value, str) and value.strip()):
        problems.add(path, f'is {describe(value)}; allowed: text')


def mapping(value: Any, path: str, problems: Problems) -> dict[str, Any]:
    """The mapping itself; an empty one where there is none, and with a problem where it is something else."""
    if value is None:
        return {}
    if isinstance(value, Mapping):
        return dict(value)
    problems.add(path, f'is {describe(value)}; allowed: a mapping')
    return {}


def short(value: Any) -> str:
    """A value as a line can show it."""
    if isinstance(value, (list, tuple)) and all(isinstance(item, (str, int)) for item in value):
        return f'[{", ".join(map(str, value))}]'
    if isinstance(value, (list, tuple, Mapping)):
        return f'{describe(value)} of {len(value)}'
    return 'null' if value is None else str(value)
