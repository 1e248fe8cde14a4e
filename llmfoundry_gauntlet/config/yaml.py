"""The one reader of YAML files. OmegaConf is imported for interpolations and overrides alone, as it takes a while."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from yaml.constructor import ConstructorError
from yaml.nodes import MappingNode

from llmfoundry_gauntlet.config.resources import shipped
from llmfoundry_gauntlet.errors import ConfigError

INTERPOLATION = '${'
FLOAT, MERGE, TIMESTAMP = (f'tag:yaml.org,2002:{name}' for name in ('float', 'merge', 'timestamp'))
NUMBER_WITH_EXPONENT = re.compile(r'[-+]?([0-9][0-9_]*(\.[0-9_]*)?|\.[0-9]+)[eE][-+]?[0-9]+$')


class StrictLoader(getattr(yaml, 'CSafeLoader', yaml.SafeLoader)):  # type: ignore[misc]  # C where PyYAML has it
    """Reads YAML as OmegaConf does: `1e-3` is a number, a date is a text, and no key may stand twice in a mapping."""

    yaml_implicit_resolvers = {  # noqa: RUF012  # PyYAML's own attribute
        first: [rule for rule in rules if rule[0] != TIMESTAMP]
        for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self.deep_construct = True  # so that PyYAML refuses a node that holds itself

    def construct_mapping(self, node: MappingNode, deep: bool = False) -> dict[Any, Any]:
        """A mapping. Raises ConstructorError where a key stands twice; what `<<` merges may be replaced."""
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            name = (key.tag, str(key.value))
            if name in seen and key.tag != MERGE:
                raise ConstructorError(None, None, f'the key {key.value} stands twice in a mapping', key.start_mark)
            seen.add(name)
        return dict(super().construct_mapping(node, deep=deep))


StrictLoader.add_implicit_resolver(FLOAT, NUMBER_WITH_EXPONENT, list('-+.0123456789'))


def open_yaml(path: str | Path, overrides: Sequence[str] = ()) -> Mapping[str, Any]:
    """A YAML file's mapping with `key=value` words merged into it, for `plain`. Raises ConfigError naming the file."""
    text, content = parse(path)
    if not isinstance(content, dict):
        kind = 'a list' if isinstance(content, list) else 'a plain text'
        raise ConfigError(f'{path}: is {kind} at its top; allowed: a mapping')
    if INTERPOLATION not in text and not overrides:
        return content
    return merged(content, path, overrides)


def parse(path: str | Path) -> tuple[str, Any]:
    """A YAML file's text, and what stands in it; of an empty file an empty mapping. Raises ConfigError."""
    try:
        text = Path(shipped(path)).read_text(encoding='utf-8')
        content = yaml.load(text, StrictLoader)
    except FileNotFoundError as error:
        raise ConfigError(f'{path}: there is no such file') from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f'{path}: cannot be read: {error}') from error
    except yaml.YAMLError as error:
        message = ' '.join(str(error).split()).replace('"<unicode string>", ', '')
        raise ConfigError(f'{path}: is not valid YAML: {message}') from error
    return text, {} if content is None else content


def merged(content: dict[str, Any], path: str | Path, overrides: Sequence[str]) -> Mapping[str, Any]:
    """The mapping as OmegaConf's, with overrides. Raises ConfigError."""
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        found = OmegaConf.merge(OmegaConf.create(content), OmegaConf.from_dotlist(list(overrides)))
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        where = f'{path}: {" ".join(overrides)}' if overrides else path
        raise ConfigError(f'{where}: {" ".join(str(error).split())}') from error
    assert isinstance(found, DictConfig)  # as both are
    return found


def plain(content: Mapping[str, Any], where: str, key: str | None = None) -> Any:
    """The mapping, or the value of a key of it, as plain Python with interpolations filled in.

    Raises ConfigError naming `where`.
    """
    if isinstance(content, dict):
        return content if key is None else content[key]
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        node = content if key is None else content[key]
        return OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
    except OmegaConfBaseException as error:
        message = str(error).splitlines()[0]
        raise ConfigError(f'{where}: an interpolation cannot be resolved: {message}') from error


def read_yaml(path: str | Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """A whole YAML file as plain Python. Raises ConfigError."""
    content: dict[str, Any] = plain(open_yaml(path, overrides), str(path))
    return content
