"""Options from the config dataclasses: names, other spellings, types, choices and help all come from the fields' metadata.

An option is known by its name and aliases, with dashes or underscores, on the command line and in a YAML file alike; a file may
nest them under the names of `config.SECTIONS` or not. The command line overrides the file, key by key. Whatever is unknown or
does not fit is a ConfigError of one line. What a value means is not decided here.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from difflib import get_close_matches
from types import NoneType
from typing import Any, NamedTuple, get_args, get_type_hints

from mtpserve.config import SECTIONS, CacheConfig, EngineConfig, ModelConfig, SamplingConfig, SchedulerConfig, ServerConfig, SpecConfig
from mtpserve.core.errors import ConfigError

Values = dict[str, object]  # field name → value, of those that were given
Sections = Mapping[str, Callable[..., Any]]

ALLOWED = {int: "a whole number", float: "a number", bool: "true or false", str: "text (in quotes, in a YAML file)"}
SPECULATIVE_KEYS = {
    "method": "speculative_algorithm",
    "num_speculative_tokens": "speculative_num_steps",
    "model": "speculative_draft_model_path",
    "disable_by_batch_size": "speculative_disable_by_batch_size",
    "speculative_disable_by_batch_size": "speculative_disable_by_batch_size",
}


NEEDLESS = {
    "trust-remote-code": "no code that comes with a checkpoint is ever run here",
    "enable-auto-tool-choice": "--tool-call-parser alone is enough",
    "speculative-use-rejection-sampling": "drafts are always verified by rejection sampling",
}


@dataclass(frozen=True, slots=True)
class Option:
    """One field of one config dataclass."""

    section: str
    name: str  # the field's, with underscores
    kind: type
    optional: bool
    default: object
    help: str
    aliases: tuple[str, ...]
    choices: tuple[str, ...] | None
    many: bool = False  # a tuple: comma-separated, a list in a YAML file, or given several times

    @property
    def spellings(self) -> tuple[str, ...]:
        return (dashed(self.name), *self.aliases)

    @property
    def metavar(self) -> str:
        return "{" + ",".join(self.choices) + "}" if self.choices else {int: "N", float: "X", str: "TEXT"}[self.kind]

    def read(self, value: object) -> object:
        """The value with the field's type; text is parsed, so that the command line and quoted YAML read alike."""
        if value is None and self.optional:
            return None
        if self.many:
            return self._read_many(value if isinstance(value, list) else [value])
        try:
            if isinstance(value, str) and self.kind in (int, float):
                value = self.kind(value)
        except ValueError:
            pass
        if self.kind is float and type(value) is int:
            value = float(value)
        if type(value) is not self.kind:
            raise ConfigError(f"--{dashed(self.name)} must be {ALLOWED[self.kind]}, got {value!r}")
        if self.choices is not None and value not in self.choices:
            raise ConfigError(f"--{dashed(self.name)} must be one of {', '.join(self.choices)}, got {value!r}")
        return value

    def _read_many(self, values: list[object]) -> tuple[str, ...]:
        # The values are not repeated: they may be keys.
        texts = [value for value in values if isinstance(value, str)]
        found = tuple(part.strip() for text in texts for part in text.split(","))
        if len(texts) < len(values) or not all(part.isprintable() and part and " " not in part for part in found):
            raise ConfigError(f"--{dashed(self.name)} must be texts without blanks, comma-separated or in a list")
        return found


class Settings(NamedTuple):
    """What `launch` needs; `engine` is the part that the engine process gets."""

    engine: EngineConfig
    server: ServerConfig


def dashed(name: str) -> str:
    return name.replace("_", "-")


def suggest(name: str, known: Iterable[str]) -> str:
    """ "; did you mean …" with the known names nearest to `name`, or nothing."""
    if (reason := NEEDLESS.get(name.lstrip("-"))) is not None:
        return f"; {reason}: leave it out"
    near = get_close_matches(name, list(known), n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(near)}?" if near else ""


def all_options(sections: Sections = SECTIONS) -> list[Option]:
    found = []
    for section, config in sections.items():
        assert isinstance(config, type)
        hints = get_type_hints(config)
        for field in fields(config):
            assert field.default is not MISSING, f"{config.__name__}.{field.name} has no default"
            kinds = [kind for kind in get_args(hints[field.name]) or (hints[field.name],) if kind is not NoneType]
            many, meta = Ellipsis in kinds, field.metadata
            optional = len(get_args(hints[field.name])) > 1 and not many
            what = (meta["help"], meta["aliases"], meta["choices"], many)
            found.append(Option(section, field.name, kinds[0], optional, field.default, *what))
    return found


class Switch(argparse.BooleanOptionalAction):
    """--x and --no-x, where x may begin with no- itself."""

    def __init__(self, option_strings: Sequence[str], dest: str, **more: Any) -> None:
        self._on = frozenset(option_strings)
        super().__init__(option_strings, dest, **more)

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        setattr(namespace, self.dest, option_string in self._on)


def add_options(parser: argparse.ArgumentParser, sections: Sections = SECTIONS) -> None:
    """One group per section. Values stay text here; what was not given is absent from the namespace."""
    for section in sections:
        group = parser.add_argument_group(f"{section} options")
        for option in all_options({section: sections[section]}):
            flags = [f"--{spelling}" for spelling in option.spellings]
            default = "" if option.default in (None, ()) else f" (default: {option.default})"
            text = (option.help + default).replace("%", "%%")
            kind: dict[str, Any] = {"action": Switch} if option.kind is bool else {"metavar": option.metavar}
            kind |= {"action": "append"} if option.many else {}
            group.add_argument(*flags, dest=option.name, default=argparse.SUPPRESS, help=text, **kind)
    both = parser.add_argument_group("several at once")
    both.add_argument("--config", metavar="FILE", help="YAML file with the same keys; the command line overrides it")
    both.add_argument("--speculative-config", metavar="JSON", help=f"speculation in one: an object with {', '.join(SPECULATIVE_KEYS)}")


def given(arguments: argparse.Namespace) -> Values:
    """The values that the user gave, checked one by one: the file's, overridden by the command line's."""
    options = {option.name: option for option in all_options()}
    values = read_file(arguments.config) if arguments.config is not None else {}
    line = {name: options[name].read(value) for name, value in vars(arguments).items() if name in options}
    if arguments.speculative_config is not None:
        merge(line, speculative(arguments.speculative_config, options))
    return values | line


def settings(values: Values) -> Settings:
    """Fill the dataclasses; they check what concerns several fields."""
    part: dict[str, Values] = {section: {} for section in SECTIONS}
    for option in all_options():
        if option.name in values:
            part[option.section][option.name] = values[option.name]
    engine = EngineConfig(
        model=ModelConfig(**part["model"]),  # type: ignore[arg-type]
        cache=CacheConfig(**part["cache"]),  # type: ignore[arg-type]
        spec=SpecConfig(**part["spec"]),  # type: ignore[arg-type]
        sampling=SamplingConfig(**part["sampling"]),  # type: ignore[arg-type]
        scheduler=SchedulerConfig(**part["scheduler"]),  # type: ignore[arg-type]
    )
    return Settings(engine, ServerConfig(**part["server"]))  # type: ignore[arg-type]


def read_file(path: str) -> Values:
    import yaml

    try:
        with open(path, encoding="utf-8") as file:
            tree = yaml.safe_load(file)
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(tree, dict | None):
        raise ConfigError(f"--config {path}: must hold keys and values, got {type(tree).__name__}")
    try:
        return from_tree(tree or {})
    except ConfigError as error:
        raise ConfigError(f"--config {path}: {error}") from error


def from_tree(tree: Mapping[object, object]) -> Values:
    """Flat or nested. `model` is both a section and an option: what it holds tells which."""
    options = all_options()
    values: Values = {}
    for key, value in tree.items():
        if key in SECTIONS and isinstance(value, dict | None):
            inside = [option for option in options if option.section == key]
            merge(values, from_keys(value or {}, inside, f" in section {key!r}"))
        else:
            merge(values, from_keys({key: value}, options, ""))
    return values


def from_keys(tree: Mapping[object, object], options: list[Option], where: str) -> Values:
    known = {spelling: option for option in options for spelling in option.spellings}
    values: Values = {}
    for key, value in tree.items():
        spelling = dashed(str(key))
        if spelling in known:
            merge(values, {known[spelling].name: known[spelling].read(value)})
        elif spelling == "speculative-config" and "speculative-algorithm" in known:
            merge(values, speculative(value, {option.name: option for option in options}))
        else:
            raise ConfigError(f"unknown key {str(key)!r}{where}{suggest(spelling, known)}")
    return values


def merge(values: Values, more: Values) -> None:
    """Add; the same option twice on one level, under two of its names, is a mistake that nobody should have to search for."""
    for name, value in more.items():
        if name in values:
            raise ConfigError(f"{dashed(name)} is given twice{'' if isinstance(value, tuple) else f': {values[name]!r} and {value!r}'}")
        values[name] = value


def speculative(value: object, options: Mapping[str, Option]) -> Values:
    """`{"method": "mtp", "num_speculative_tokens": 3}`, as text or parsed."""
    if isinstance(value, str):
        import json

        try:
            value = json.loads(value)
        except ValueError as error:
            raise ConfigError(f"--speculative-config is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"--speculative-config must be a JSON object, got {value!r}")
    for key in value:
        if key not in SPECULATIVE_KEYS:
            raise ConfigError(f"unknown key {key!r} in --speculative-config; accepted: {', '.join(SPECULATIVE_KEYS)}")
    return {SPECULATIVE_KEYS[key]: options[SPECULATIVE_KEYS[key]].read(inner) for key, inner in value.items()}
