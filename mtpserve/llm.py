"""Offline inference: `LLM(...)` runs the engine in this process, without server and sockets, with the same
steps, text rules and limits."""

from __future__ import annotations

import difflib
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, Self, TypeVar

from mtpserve.config import SECTIONS, EngineConfig
from mtpserve.config.options import check
from mtpserve.core.errors import ConfigError, EngineBusy, InvalidRequest, RequestFailed
from mtpserve.core.protocols.adapters import LoRARequest
from mtpserve.core.protocols.control import MEMORY_TAGS, Call, Reply, Sleep, WakeUp
from mtpserve.core.request import Finish, Request, TokenEvent
from mtpserve.core.sampling import SamplingParams
from mtpserve.text.messages import Message, chat_prompts
from mtpserve.text.outputs import Completion, OfflineRequest, StreamStep
from mtpserve.text.requests import Prompt, request_from
from mtpserve.text.tokenizer import tokenizer_of
from mtpserve.weights.checkpoint.hub import fetched

if TYPE_CHECKING:
    from mtpserve.engine.engine import Engine

T = TypeVar("T")
SamplingList = SamplingParams | Sequence[SamplingParams] | None
LoRAList = LoRARequest | Sequence[LoRARequest | None] | None
# Methods of vLLM's LLM that do not exist here, with the reason.
VECTORS = "the model continues text, and computes no vectors or scores"
REFUSED = {
    **dict.fromkeys(("encode", "embed", "classify", "score", "reward"), VECTORS),
    "beam_search": "there is no beam search: sample with several seeds, and compare logprobs",
    **dict.fromkeys(("collective_rpc", "apply_model"), "the engine runs no functions of the caller"),
}


class LLM:
    """Options are the fields of the config dataclasses or their aliases, as on the command line with
    underscores: `LLM("demo", page_size=32)`, or `LLM("demo", max_model_len=1024)` as in vLLM.

    Raises ConfigError and LoadError. Not thread-safe.
    """

    def __init__(self, model: str = "demo", **options: Any) -> None:
        self.config = fetched(check_alone(engine_config({"model": model, **options})))
        self.tokenizer = tokenizer_of(self.config.model)
        # Not at the top: it imports torch, and the tokenizer's errors are raised before that.
        build = import_module("mtpserve.engine.startup.build")
        self.engine: Engine = build.build_engine(self.config, progress=sys.stderr.isatty())
        self.config = replace(self.config, spec=build.as_chosen(self.config.spec, self.engine.card))
        self._ids = itertools.count()
        # of steps that were read before a call, with the version of the weights until then
        self._late: list[tuple[str, TokenEvent]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Frees the engine's memory. Nothing else may be called afterwards."""
        self.engine.close()
        del self.engine

    def reset_prefix_cache(self) -> None:
        """Later prompts find nothing that was computed before."""
        self.engine.reset_prefix_cache()

    def update_weights(
        self, named_tensors: Iterable[tuple[str, Any]], *, weight_version: str | None = None
    ) -> None:
        """New weights by a checkpoint's names, all or some. Open streams go on, their texts computed again.
        Each GiB is checked before it is written. Raises LoadError, which names the tensor, and
        InvalidRequest."""
        import_module("mtpserve.engine.updates.named_updates").update(
            self.control, named_tensors, weight_version
        )

    def sleep(self, level: int = 1) -> None:
        """Gives memory back: the KV cache is dropped. Level 1 moves the weights of a GPU to host memory;
        level 2 drops weights. Nothing is generated until `wake_up`. Raises InvalidRequest, and EngineBusy
        while streams are open."""
        if level not in (1, 2):
            raise InvalidRequest(f"level must be 1 or 2, got {level!r}", "level")
        stats = self.engine.stats
        if stats.running or stats.waiting:
            raise EngineBusy("streams are open: read them to their ends or close them, then sleep")
        self.control(Sleep(list(MEMORY_TAGS), drops_weights=level == 2))

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Takes the memory of some tags, weights and kv_cache, or of all again. Weights that were dropped are
        loaded as at the start. Raises InvalidRequest."""
        self.control(WakeUp(None if tags is None else list(tags)))

    def is_sleeping(self) -> bool:
        return self.engine.stats.sleeping > 0

    @property
    def weight_version(self) -> str:
        return self.engine.weight_version

    def control(self, call: Call) -> Reply:
        """Has the engine do what an operator's call says, with no step in flight. Raises InvalidRequest and
        RequestFailed."""
        self._late += self._with_version(self.engine.settle())
        return self.engine.controls.take(call).check()

    def sampling(self, **values: Any) -> SamplingParams:
        """The model's recommended sampling parameters, overridden by `values`."""
        return SamplingParams(**(self.tokenizer.defaults | values))

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingList = None,
        progress: Callable[[int], None] = lambda ended: None,
        *,
        sampling_params: SamplingList = None,
        lora_request: LoRAList = None,
    ) -> list[Completion]:
        """One completion per prompt, in order. A prompt is a text or token ids; `sampling` is for all or one
        for each; `sampling_params` is vLLM's name of it. So is `lora_request` for all or one for each: an
        adapter, which is loaded when it is first used. `progress` gets the number of prompts that have
        ended, each time that one ends.

        Without `sampling`, the model's recommended parameters, up to the context length. Raises
        InvalidRequest if any prompt is invalid.
        """
        sampling = sampling_of(sampling, sampling_params)
        prompt_list = listed(prompts)
        params = (
            [sampling or self.sampling()] * len(prompt_list)
            if sampling is None or isinstance(sampling, SamplingParams)
            else list(sampling)
        )
        if len(params) != len(prompt_list):
            raise InvalidRequest(
                f"there are {len(prompt_list)} prompts and {len(params)} sampling parameters", "sampling"
            )
        loras = (
            list(lora_request) if isinstance(lora_request, Sequence) else [lora_request] * len(prompt_list)
        )
        if len(loras) != len(prompt_list):
            raise InvalidRequest(
                f"there are {len(prompt_list)} prompts and {len(loras)} adapters", "lora_request"
            )
        outputs: dict[str, OfflineRequest] = {}
        ended = 0
        for id, step in self._run(prompt_list, params, outputs, loras):
            outputs[id].steps.append(step)
            if step.finish is not None:
                ended += 1
                progress(ended)
        return [output.completion() for output in outputs.values()]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingList = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        lora_request: LoRAList = None,
        progress: Callable[[int], None] = lambda ended: None,
    ) -> list[Completion]:
        """One completion per conversation, in order: `messages` is one conversation, or a list of them, in
        OpenAI's form. The model's chat template writes the prompt, as in vLLM's `LLM.chat`; the text of a
        completion is the model's, with its reasoning and tool calls as it writes them.

        `tools`: in OpenAI's form, for the template. `continue_final_message`: the model continues the last
        message; `add_generation_prompt` is then False. `chat_template_kwargs`: variables of the template,
        like {"enable_thinking": False}. Raises InvalidRequest without a chat template, and for messages that
        are not text.
        """
        prompts = chat_prompts(
            self.tokenizer,
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=chat_template_kwargs,
        )
        return self.generate(prompts, sampling_params, progress, lora_request=lora_request)

    def __getattr__(self, name: str) -> Any:
        reason = f": {REFUSED[name]}" if name in REFUSED else ""
        raise AttributeError(f"LLM has no {name!r}{reason}")

    def stream(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        lora_request: LoRARequest | None = None,
    ) -> Iterator[StreamStep]:
        """The steps of one prompt as they come; closing the iterator ends the request. Raises RequestFailed
        if the request fails."""
        for _, step in self._run([prompt], [sampling or self.sampling()], {}, [lora_request]):
            if step.finish is Finish.ERROR:
                raise RequestFailed(step.error or "the request failed")
            yield step

    def _run(
        self,
        prompts: Sequence[Prompt],
        sampling: Sequence[SamplingParams],
        outputs: dict[str, OfflineRequest],
        loras: Sequence[LoRARequest | None],
    ) -> Iterator[tuple[str, StreamStep]]:
        """Runs the engine until all requests have ended. `outputs` is filled with one entry per prompt, in
        order."""
        live: set[str] = set()
        engine = self.engine  # an iterator that is not closed may outlive `close`
        if self.is_sleeping():
            raise EngineBusy("the engine sleeps: call wake_up() first")
        try:
            for prompt, params, lora in zip(prompts, sampling, loras, strict=True):
                request = request_from(self.tokenizer, prompt, params, f"offline-{next(self._ids)}", lora)
                outputs[request.id] = OfflineRequest.of(self.tokenizer, request, engine.card)
                while not self._add(request):
                    yield from self._step(outputs, live)
                live.add(request.id)
            while live:
                yield from self._step(outputs, live)
        finally:
            for id in live:
                engine.abort(id)

    def _add(self, request: Request) -> bool:
        """False if the queue is full: try again after a step."""
        try:
            self.engine.add(request)
        except EngineBusy:
            if not self.engine.has_work:
                raise
            return False
        return True

    def _step(self, outputs: dict[str, OfflineRequest], live: set[str]) -> Iterator[tuple[str, StreamStep]]:
        late, self._late = self._late, []
        for version, event in late + self._with_version(self.engine.step()):
            if event.id not in live:  # ended by a stop string, or by the caller
                continue
            step = outputs[event.id].take(event, version)
            if step.finish is not None:
                live.remove(event.id)
                if event.finish is None:
                    self.engine.abort(event.id)
            yield event.id, step

    def _with_version(self, events: Sequence[TokenEvent]) -> list[tuple[str, TokenEvent]]:
        return [(self.engine.weight_version, event) for event in events]


def sampling_of(sampling: T, sampling_params: T) -> T:
    """Returns the one that is not None. Raises InvalidRequest where both are there."""
    if sampling is not None and sampling_params is not None:
        raise InvalidRequest("give sampling or sampling_params, not both", "sampling_params")
    return sampling_params if sampling is None else sampling


def listed(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if prompts and isinstance(prompts[0], int):
        return [prompts]  # type: ignore[list-item]  # the elements of a sequence are alike
    return list(prompts)  # type: ignore[arg-type]


def engine_config(options: dict[str, Any]) -> EngineConfig:
    """Sorts options into the sections of the configuration. Raises ConfigError for an unknown one."""
    sections = {name: config for name, config in SECTIONS.items() if name != "server"}
    homes: dict[str, tuple[str, str]] = {}  # name or alias → section and name
    for section, config in sections.items():
        for entry in fields(config):  # type: ignore[arg-type]
            aliases = (alias.replace("-", "_") for alias in entry.metadata["aliases"])
            names = (entry.name, *(alias for alias in aliases if not alias.startswith("no_")))
            homes |= dict.fromkeys(names, (section, entry.name))
    values: dict[str, dict[str, Any]] = {section: {} for section in sections}
    for name, value in options.items():
        if name not in homes:
            near = difflib.get_close_matches(name, homes, 1)
            raise ConfigError(f"unknown option {name!r}" + (f"; did you mean {near[0]}?" if near else ""))
        section, field_name = homes[name]
        if field_name in values[section]:
            raise ConfigError(f"{field_name} is given twice, also as {name!r}")
        values[section][field_name] = value
    return EngineConfig(**{section: config(**values[section]) for section, config in sections.items()})


def check_alone(config: EngineConfig) -> EngineConfig:
    """Returns the configuration. Raises ConfigError for options of several engines and their processes."""
    for name, alone in (("data_parallel_size", 1), ("engine_restarts", None), ("engine_timeout", 20.0)):
        value = getattr(config.parallel, name)
        check(value == alone, name, value, "left out: one engine computes in this process; see AsyncLLM")
    return config
