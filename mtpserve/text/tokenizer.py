"""The model's tokenizer and chat template. A thin wrapper around transformers' fast tokenizer; no incremental
decoding here.

In a plain prompt the text of a special token encodes to that token. In a client's chat messages it stays
text: see control.py.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateSyntaxError
from tokenizers import AddedToken, Tokenizer as FastTokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

# Not AutoTokenizer: that one imports torch, which costs this process four seconds and 250 MB.
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from mtpserve.config import ModelConfig
from mtpserve.core.errors import ConfigError, InvalidRequest, LoadError
from mtpserve.core.gguf import SUFFIX
from mtpserve.core.sampling import SAMPLING_FIELDS
from mtpserve.text import gguf
from mtpserve.text.control import ControlTokens, RenderedChat, marked

# Parameters of the renderer, with which a request could choose the template itself or call the tokenizer; the
# variables that the renderer sets; and the functions that templates call.
RESERVED = frozenset(inspect.signature(PreTrainedTokenizerFast.apply_chat_template).parameters) | {
    "messages", "raise_exception", "strftime_now", "range", "namespace", "dict", "lipsum", "cycler", "joiner",
}  # fmt: skip
# letter → byte in byte-level vocabularies (GPT-2's)
BYTES: dict[str, int] = {letter: byte for byte, letter in bytes_to_unicode().items()}

Arranged = Callable[[list[dict[str, Any]], list[dict[str, Any]] | None], list[dict[str, Any]]]


class Tokenizer:
    """`defaults` are the sampling parameters that the model's makers recommend, from its
    generation_config.json or its GGUF file."""

    def __init__(
        self,
        directory: str | Path,
        numbers: bool = False,
        *,
        chat_template: str | None = None,
        recommends: bool = True,
    ) -> None:
        """`directory`, or a GGUF file. `numbers`: the directory has no tokenizer, and text is token ids
        separated by blanks. `chat_template`: a file that replaces the model's own. `recommends` False:
        `defaults` is empty."""
        self.directory = Path(directory)
        self._tokenizer: Any = (number_tokenizer if numbers else loaded)(self.directory)
        if chat_template is not None:
            set_template(self._tokenizer, Path(chat_template))
        self.fast: FastTokenizer = self._tokenizer.backend_tokenizer
        self.defaults = sampling_defaults(self.directory) if recommends else {}
        added = self.fast.get_added_tokens_decoder()
        self._added: dict[int, bytes] = {id: token.content.encode() for id, token in added.items()}
        self._marker_ids = {token.content: id for id, token in added.items()}
        # not shown where special tokens are skipped
        self.hidden_ids = frozenset(id for id, token in added.items() if token.special)
        self._control = ControlTokens(self.fast)
        # byte-level vocabularies have a token for each byte; this is the space's
        space = self.fast.token_to_id("Ġ")
        self._byte_level = space is not None and self.decode([space]) == " "

    @property
    def special_ids(self) -> frozenset[int]:
        return frozenset(self._tokenizer.all_special_ids)

    @property
    def has_chat_template(self) -> bool:
        return self._tokenizer.chat_template is not None

    def marker_id(self, text: str) -> int | None:
        """The id of the added token, special or not, whose text is exactly this."""
        return self._marker_ids.get(text)

    def info(self) -> dict[str, Any]:
        """What its configuration says, tokens as their texts, with the template in use; without the files
        that it was read from."""
        said = {
            name: plain(value)
            for name, value in self._tokenizer.init_kwargs.items()
            if not name.endswith("_file")
        }
        named = {"tokenizer_class": "PreTrainedTokenizerFast"} | said
        return named | {"chat_template": self._tokenizer.chat_template}

    def template_takes(self, name: str) -> bool:
        """True if the template mentions this variable and neither the renderer nor the tokenizer sets it."""
        if name in RESERVED or name.endswith("_token") or name in self._tokenizer.special_tokens_map:
            return False
        return any(re.search(rf"\b{re.escape(name)}\b", text) for text in self._templates)

    def template_mentions(self, text: str) -> bool:
        return any(text in template for template in self._templates)

    @property
    def _templates(self) -> list[str]:
        template = self._tokenizer.chat_template
        return list(template.values()) if isinstance(template, dict) else [template or ""]

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """`special` adds what the model expects around a prompt; a rendered chat has it already."""
        ids: list[int] = self.fast.encode(text, add_special_tokens=special).ids
        return ids

    def encode_chat(self, chat: RenderedChat, *, special: bool = False) -> list[int]:
        """Only the template's own control tokens are encoded as such. Raises InvalidRequest if one in the
        client's text has no other encoding."""
        return (
            self._control.encode(chat, special=special)
            if chat.spellings
            else self.encode(chat.marked, special=special)
        )

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        text: str = self.fast.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token, which may be a part of a character. An added token's are its own text."""
        if token in self._added:
            return self._added[token]
        spelled: str | None = self.fast.id_to_token(token)
        if spelled is None:  # models pad their vocabulary
            return b""
        if self._byte_level:
            return (
                bytes(BYTES[letter] for letter in spelled)
                if BYTES.keys() >= set(spelled)
                else spelled.encode()
            )
        if len(spelled) == 6 and spelled.startswith("<0x"):
            return bytes([int(spelled[3:5], 16)])
        return spelled.replace("▁", " ").encode()

    def piece(self, token: int) -> str:
        """Returns the token as the vocabulary spells it."""
        spelled: str | None = self.fast.id_to_token(token)
        return spelled or ""

    def token_text(self, token: int) -> str:
        """Returns the text that OpenAI shows: a token that is not whole characters is bytes:\\x…"""
        written = self.token_bytes(token)
        try:
            return written.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in written)

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        arranged: Arranged | None = None,
    ) -> RenderedChat:
        """Renders the model's template in Jinja's immutable sandbox. Raises InvalidRequest when there is none
        or when it fails.

        `variables` are set in the template; those that the library itself reads are not allowed. With
        `continue_final_message` the text ends where the last message does. `arranged` turns messages and
        tools into what the template needs; control tokens in what it adds are encoded as such, unlike those
        in the client's text.
        """
        if not self.has_chat_template:
            raise InvalidRequest("this model has no chat template: use /v1/completions", "messages")
        if (
            tools is None
            and isinstance(self._tokenizer.chat_template, dict)
            and any("tool_calls" in message for message in messages)
        ):
            tools = []  # with several templates, the library then picks the one for tool calls
        spellings: dict[int, str] = {}
        try:
            if marks := self._control.marks([messages, tools, variables]):
                messages, tools, variables = marked([messages, tools, variables], marks)
                spellings = {ord(mark): token for token, mark in marks.items()}
            if arranged is not None:
                messages = arranged(messages, tools)
            text = self._tokenizer.apply_chat_template(
                messages,
                tools=tools,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **(variables or {}),
            )
        except InvalidRequest:
            raise
        except Exception as error:  # a template can raise anything, and refuses conversations by raising
            message = " ".join(str(error).split())[:200]
            raise InvalidRequest(
                f"the model's chat template failed: {message.translate(spellings)}", "messages"
            ) from error
        return RenderedChat(str(text), spellings)


def tokenizer_of(model: ModelConfig) -> Tokenizer:
    return Tokenizer(
        model.tokenizer_directory,
        model.numbers_for_text,
        chat_template=model.chat_template,
        recommends=model.recommends,
    )


def set_template(tokenizer: Any, file: Path) -> None:
    try:
        tokenizer.chat_template = file.read_text(encoding="utf-8")
        tokenizer.apply_chat_template([{"role": "user", "content": ""}], tokenize=False)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--chat-template {file}: {getattr(error, 'strerror', None) or error}") from error
    except TemplateSyntaxError as error:
        raise ConfigError(f"--chat-template {file}: line {error.lineno}: {error.message}") from error
    except Exception:  # a template may refuse this conversation; only its syntax is checked here
        return


def number_tokenizer(directory: Path) -> PreTrainedTokenizerFast:
    """One token per row of the vocabulary, whose text is its id; every other word is token 0."""
    config = directory / "config.json"
    try:
        values = json.loads(config.read_text(encoding="utf-8"))
        vocab = values["vocab_size"] if "vocab_size" in values else values["text_config"]["vocab_size"]
        tokenizer = FastTokenizer(WordLevel({str(token): token for token in range(vocab)}, unk_token="0"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LoadError(f"{config}: has no vocab_size, which text without a tokenizer needs") from error
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def loaded(directory: Path) -> PreTrainedTokenizerFast:
    if directory.suffix == SUFFIX:
        fast_tokenizer = gguf.fast_tokenizer(directory)
        return PreTrainedTokenizerFast(
            tokenizer_object=fast_tokenizer,
            chat_template=gguf.chat_template(directory),
            **gguf.named_tokens(directory),
        )
    file = directory / "tokenizer.json"
    if not directory.is_dir():
        raise LoadError(f"{directory}: no such directory")
    if not file.is_file():
        raise LoadError(f"{file}: no such file; mtpserve needs the tokenizer in this form")
    try:
        return PreTrainedTokenizerFast.from_pretrained(str(directory), local_files_only=True)
    except Exception as error:  # the library raises bare Exception for a tokenizer.json that it cannot parse
        broken = why_not(file)
        why = error if broken is None else f"is not a tokenizer: {broken}"
        raise LoadError(f"{file}: {' '.join(str(why).split())[:300]}") from error


def why_not(file: Path) -> Exception | None:
    """What speaks against the file itself, in the words of the library that defines its format; None:
    nothing."""
    try:
        FastTokenizer.from_file(str(file))
    except Exception as error:  # bare as well
        return error
    return None


def plain(value: Any) -> Any:
    """JSON of a tokenizer's setting."""
    match value:
        case AddedToken():
            return value.content
        case Mapping():
            return {str(name): plain(inner) for name, inner in value.items()}
        case list() | tuple():
            return [plain(inner) for inner in value]
        case None | bool() | int() | float() | str():
            return value
        case _:
            return str(value)


def sampling_defaults(directory: Path) -> dict[str, float | int]:
    """`do_sample` is ignored: a server samples at the given temperature, and temperature 0 is greedy."""
    if directory.suffix == SUFFIX:
        return gguf.recommended(directory)
    file = directory / "generation_config.json"
    if not file.is_file():
        return {}
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise LoadError(f"{file}: {error}") from error
    if not isinstance(values, dict):
        raise LoadError(f"{file}: not an object")
    return {name: values[name] for name in SAMPLING_FIELDS if isinstance(values.get(name), int | float)}
