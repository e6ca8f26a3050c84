"""Options from the config dataclasses: names, aliases, types, choices and help all come from the fields and
their metadata.

An option has the same name and aliases, with dashes or underscores, on the command line and in a YAML file; a
file may nest options under the names of `config.SECTIONS`. The command line overrides the file, option by
option. An unknown option or a wrong value is a ConfigError of one line.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from difflib import get_close_matches
from types import NoneType
from typing import Any, NamedTuple, get_args, get_type_hints

from mtpserve.cli.noops import NO_OPS, is_no_op
from mtpserve.cli.peers import INSTEAD, UNUSED_KEYS
from mtpserve.config import ENGINE_SECTIONS, SECTIONS, EngineConfig, ServerConfig
from mtpserve.config.spec import NONE
from mtpserve.core.errors import ConfigError

log = logging.getLogger(__name__)

Values = dict[str, object]  # field name → value, for the fields that were given
Sections = Mapping[str, Callable[..., Any]]

ALLOWED = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text (in quotes, in a YAML file)",
}
# Groups of --help, by the sections of a YAML file
TITLES = {
    "model": "model and weights",
    "cache": "KV cache and prefix cache",
    "spec": "speculative decoding",
    "sampling": "sampling",
    "scheduler": "scheduling",
    "parallel": "several GPUs or engines",
    "disaggregation": "prefill and decode on separate nodes",
    "cpu": "CPU threads",
    "server": "HTTP server",
}
# Options that --help shows
COMMON = frozenset({
    "model", "tokenizer", "revision", "served_model_name", "dtype", "quantization", "device",
    "context_length", "max_total_tokens", "mem_fraction_static", "kv_cache_dtype", "kv_offload_gib",
    "speculative_algorithm", "speculative_num_steps", "speculative_adaptive",
    "speculative_draft_model_path", "max_running_requests", "chunked_prefill_size", "random_seed",
    "tensor_parallel_size", "data_parallel_size", "cpu_threads", "host", "port", "api_key_file",
    "ssl_certfile", "ssl_keyfile", "log_level", "log_requests", "drain_timeout", "tool_call_parser",
    "reasoning_parser",
})  # fmt: skip
# Options of other servers that change nothing here
NO_EFFECT = frozenset({"enable_metrics", "enable_auto_tool_choice", "enable_chunked_prefill"})
# Options whose value is a JSON object: its members may be given one by one.
OBJECTS = (
    "--speculative-config",
    "--kv-transfer-config",
    "--kv-events-config",
    "--default-chat-template-kwargs",
)
SUFFIXED = re.compile(r"(\d+(?:\.\d+)?)([kmgtKMGT])")
SIMILAR = 0.75  # names that share less are no suggestion
SPECULATIVE_KEYS = {
    "method": "speculative_algorithm",
    "num_speculative_tokens": "speculative_num_steps",
    "model": "speculative_draft_model_path",
    "disable_by_batch_size": "speculative_disable_by_batch_size",
    "speculative_disable_by_batch_size": "speculative_disable_by_batch_size",
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
    many: bool = False  # a tuple: comma-separated text, a list in a YAML file, or given several times
    synonyms: tuple[tuple[str, object], ...] = ()  # texts, and the values that they mean

    @property
    def spellings(self) -> tuple[str, ...]:
        return (dashed(self.name), *self.aliases)

    @property
    def metavar(self) -> str:
        return (
            "{" + ",".join(self.choices) + "}"
            if self.choices
            else {int: "N", float: "X", str: "TEXT"}[self.kind]
        )

    @property
    def default_text(self) -> str | None:
        """The default for people. None: it has none, or its help says it."""
        if isinstance(self.default, bool):
            return "on" if self.default else "off"
        text = ",".join(self.default) if isinstance(self.default, tuple) else self.default
        return None if text in (None, "") else f"{text:g}" if isinstance(text, float) else str(text)

    def read(self, value: object) -> object:
        """The value with the field's type. Text is parsed, so that numbers may be quoted in YAML."""
        value = dict(self.synonyms).get(str(value), value)
        if value is None and self.optional:
            return None
        if self.many:
            return self._read_many(value if isinstance(value, list) else [value])
        if isinstance(value, str) and self.kind in (int, float):
            value = number_of(value, self.kind)
        if self.kind is float and type(value) is int:
            value = float(value)
        if type(value) is not self.kind:
            raise ConfigError(f"--{dashed(self.name)} must be {ALLOWED[self.kind]}, got {value!r}")
        if self.choices is not None and value not in self.choices:
            raise ConfigError(
                f"--{dashed(self.name)} must be one of {', '.join(self.choices)}, got {value!r}"
            )
        return value

    def _read_many(self, values: list[object]) -> tuple[str, ...]:
        # The error does not show the values: they may be API keys.
        texts = [value for value in values if isinstance(value, str)]
        objects = [text.strip().startswith("{") for text in texts]  # JSON has commas and spaces of its own
        parts = tuple(
            item.strip()
            for text, is_object in zip(texts, objects, strict=True)
            for item in ([text] if is_object else text.split(","))
        )
        if len(texts) < len(values) or not all(
            item.isprintable() and item and (" " not in item or item.startswith("{")) for item in parts
        ):
            raise ConfigError(
                f"--{dashed(self.name)} must be texts without spaces, comma-separated or in a list"
            )
        return parts


def number_of(text: str, kind: type) -> object:
    """The number, or the text where it is none. vLLM's suffixes: 32k is 32,000, and 32K is 32,768."""
    try:
        if kind is int and (match := SUFFIXED.fullmatch(text)) is not None:
            power = 1 + "kmgt".index(match[2].lower())
            number = float(match[1]) * (1000 if match[2].islower() else 1024) ** power
            return int(number) if number.is_integer() else text
        return kind(text)
    except ValueError:
        return text


class Settings(NamedTuple):
    """All options; `engine` is the part that the engine process gets."""

    engine: EngineConfig
    server: ServerConfig


def dashed(name: str) -> str:
    return name.replace("_", "-")


def suggest(name: str, names: Iterable[str]) -> str:
    """The end of an error about `name`: "; " and the advice in peers.py or the most similar known names; ""
    if there are none."""
    bare = dashed(name.lstrip("-"))
    if (instead := INSTEAD.get(bare)) is not None:
        return f"; {instead}"
    if (no_op := NO_OPS.get(bare.removeprefix("no-"))) is not None:
        return f"; it cannot be turned off: {no_op.why}"
    by_bare = {candidate.lstrip("-"): candidate for candidate in names}
    near = get_close_matches(bare, by_bare, n=3, cutoff=SIMILAR)
    near = near or [longer for longer in by_bare if len(bare) > 3 and longer.startswith(f"{bare}-")][:3]
    return f"; did you mean {' or '.join(by_bare[similar] for similar in near)}?" if near else ""


def all_options(sections: Sections = SECTIONS) -> list[Option]:
    options = []
    for section, config in sections.items():
        assert isinstance(config, type)
        hints = get_type_hints(config)
        for field in fields(config):
            assert field.default is not MISSING, f"{config.__name__}.{field.name} has no default"
            kinds = [
                kind for kind in get_args(hints[field.name]) or (hints[field.name],) if kind is not NoneType
            ]
            many, meta = Ellipsis in kinds, field.metadata
            optional = len(get_args(hints[field.name])) > 1 and not many
            what = (meta["help"], meta["aliases"], meta["choices"], many, meta["synonyms"])
            options.append(Option(section, field.name, kinds[0], optional, field.default, *what))
    return options


class Switch(argparse.BooleanOptionalAction):
    """--x and --no-x; where one of an option's names begins with no-, the rest of it turns the option off."""

    def __init__(self, option_strings: Sequence[str], dest: str, is_on: bool, **more: Any) -> None:
        self._on = frozenset(option_strings)
        super().__init__(option_strings, dest, **more)
        self.option_strings = [name.replace("--no-no-", "--") for name in self.option_strings]
        # an option that is off by default is only ever turned on, under all its names
        self.shown = self.option_strings if is_on else [name for name in option_strings if name in self._on]

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, option_string in self._on)


class Several(argparse.Action):
    """Values up to the next option, each time; `several` is set to the name that got more than one."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, [*getattr(namespace, self.dest, ()), *values])
        if len(values) > 1:
            namespace.several = option_string


def add_options(
    parser: argparse.ArgumentParser, sections: Sections = SECTIONS, only: Collection[str] | None = None
) -> None:
    """One group per section, of the fields in `only` where that is given. Values stay text; options that are
    not given are absent from the namespace."""
    unused = parser.add_argument_group("options of other servers without effect here")
    for section in sections:
        options = [
            option
            for option in all_options({section: sections[section]})
            if only is None or option.name in only
        ]
        subject = parser.add_argument_group(TITLES.get(section, section))
        for option in options:
            flags = [f"--{spelling}" for spelling in option.spellings]
            default = "" if option.default_text is None else f" (default: {option.default_text})"
            text = (option.help + default).replace("%", "%%")
            is_switch = option.kind is bool
            kind: dict[str, Any] = (
                {"action": Switch, "is_on": option.default} if is_switch else {"metavar": option.metavar}
            )
            group = unused if option.name in NO_EFFECT else subject
            kind |= {"action": Several, "nargs": "+"} if option.many else {}
            group.add_argument(*flags, dest=option.name, default=argparse.SUPPRESS, help=text, **kind)
    both = parser.add_argument_group("options from a file, or as JSON")
    both.add_argument(
        "--config", metavar="FILE", help="YAML file with options as keys; the command line overrides it"
    )
    both.add_argument(
        "--speculative-config",
        metavar="JSON",
        help=(
            f"speculation as one JSON object with {', '.join(SPECULATIVE_KEYS)}; null: no speculation; "
            f"{{}}: the default"
        ),
    )
    parser._action_groups.remove(unused)  # last
    parser._action_groups.append(unused)


def parsed_values(arguments: argparse.Namespace) -> Values:
    """The given values, each checked by itself: the file's, overridden by the command line's."""
    options = {option.name: option for option in all_options()}
    values = read_file(arguments.config) if arguments.config is not None else {}
    line = {name: options[name].read(value) for name, value in vars(arguments).items() if name in options}
    if getattr(arguments, "checkpoint", None) is not None:
        merge(line, {"model": arguments.checkpoint})
    if arguments.speculative_config is not None:
        merge(line, speculative(arguments.speculative_config, options))
    if hasattr(arguments, "several") and hasattr(arguments, "checkpoint") and "model" not in values | line:
        # or a model's name would be taken for a key, and another model be served
        raise ConfigError(
            f"{arguments.several} takes all words up to the next option: put MODEL before it, or use --model"
        )
    return values | line


def settings(values: Values) -> Settings:
    """Fills the dataclasses, which check combinations of fields."""
    by_section: dict[str, Values] = {section: {} for section in SECTIONS}
    for option in all_options():
        if option.name in values:
            by_section[option.section][option.name] = values[option.name]
    engine = {section: config(**by_section[section]) for section, config in ENGINE_SECTIONS.items()}
    return Settings(EngineConfig(**engine), ServerConfig(**by_section["server"]))  # type: ignore[arg-type]


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
        raise ConfigError(
            f"--config {path}: must be a YAML mapping of options to values, got {type(tree).__name__}"
        )
    try:
        return from_tree(tree or {})
    except ConfigError as error:
        raise ConfigError(f"--config {path}: {error}") from error


def from_tree(tree: Mapping[object, object]) -> Values:
    """The options of a YAML file, nested or not. `model` is both a section and an option: it is the section
    if it is a mapping."""
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
    by_spelling = {spelling: option for option in options for spelling in option.spellings}
    values: Values = {}
    for key, value in tree.items():
        spelling = dashed(str(key))
        text = str(value) if isinstance(value, str | int | float) and value is not True else None
        if is_no_op(spelling, text):
            continue
        if spelling in by_spelling:
            merge(values, {by_spelling[spelling].name: by_spelling[spelling].read(value)})
        elif type(value) is bool and (switch := by_spelling.get(f"no-{spelling}")) is not None:
            merge(values, {switch.name: not value})
        elif spelling == "speculative-config" and "speculative-algorithm" in by_spelling:
            merge(values, speculative(value, {option.name: option for option in options}))
        else:
            raise ConfigError(f"unknown key {str(key)!r}{where}{suggest(spelling, by_spelling)}")
    return values


def merge(values: Values, more: Values) -> None:
    """Adds `more`. Raises ConfigError for an option that is given twice in one place, under two of its
    names."""
    for name, value in more.items():
        if name in values:
            raise ConfigError(
                f"{dashed(name)} is given "
                f"twice{'' if isinstance(value, tuple) else f': {values[name]!r} and {value!r}'}"
            )
        values[name] = value


def speculative(value: object, options: Mapping[str, Option]) -> Values:
    """`{"method": "mtp", "num_speculative_tokens": 3}`, as text or parsed. null turns speculation off; {}
    leaves it to the model, as no option does."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ConfigError(f"--speculative-config is not JSON: {error}") from error
    if value is None:
        return {"speculative_algorithm": NONE}
    if not isinstance(value, dict):
        raise ConfigError(f"--speculative-config must be a JSON object, got {value!r}")
    values: Values = {}
    for key, inner in value.items():
        if key in SPECULATIVE_KEYS:
            name = SPECULATIVE_KEYS[key]
            merge(values, {name: options[name].read(inner)})
        elif key not in UNUSED_KEYS:
            advice = INSTEAD.get(dashed(str(key)), f"accepted: {', '.join(SPECULATIVE_KEYS)}")
            raise ConfigError(f"unknown key {key!r} in --speculative-config; {advice}")
        elif (unused := UNUSED_KEYS[key]) is not None and inner not in unused:
            allowed = " or ".join(json.dumps(one) for one in unused)
            raise ConfigError(f"{key!r} in --speculative-config must be {allowed}, got {inner!r}")
        else:
            log.warning("--speculative-config: %r is ignored, it changes nothing here", key)
    return values
