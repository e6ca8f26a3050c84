"""Offline inference: `LLM(...)` runs the engine in this process, without server and sockets, with the same
steps, text rules and limits."""

from __future__ import annotations

import difflib
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, Self

from mtpserve.config import SECTIONS, EngineConfig
from mtpserve.config.options import check
from mtpserve.core.errors import ConfigError, EngineBusy, InvalidRequest, RequestFailed
from mtpserve.core.protocols.adapters import LoRARequest
from mtpserve.core.protocols.control import Call, Reply
from mtpserve.core.request import Finish, Request, TokenEvent
from mtpserve.core.sampling import SamplingParams
from mtpserve.text.detokenizer import Detokenizer
from mtpserve.text.messages import Message, conversations_of, for_template
from mtpserve.text.outputs import Completion, OfflineRequest, StreamStep
from mtpserve.text.requests import request_of, spelling_of
from mtpserve.text.tokenizer import tokenizer_of
from mtpserve.weights.checkpoint.hub import fetched

if TYPE_CHECKING:
    from mtpserve.engine.engine import Engine

Prompt = str | Sequence[int]
SamplingList = SamplingParams | Sequence[SamplingParams] | None
LoRAList = LoRARequest | Sequence[LoRARequest | None] | None
# Methods of vLLM's LLM that do not exist here, with the reason.
VECTORS = "the model continues text, and computes no vectors or scores"
REFUSED = {
    **dict.fromkeys(("encode", "embed", "classify", "score", "reward"), VECTORS),
    "beam_search": "there is no beam search: sample with several seeds, and compare logprobs",
    **dict.fromkeys(("collective_rpc", "apply_model"), "the engine runs no functions of the caller"),
    **dict.fromkeys(("sleep", "wake_up"), "use close(), which frees the memory, and create the LLM again"),
}


class LLM:
    """Options are the fields of the config dataclasses or their aliases, as on the command line with
    underscores: `LLM("demo", page_size=32)`, or `LLM("demo", max_model_len=1024)` as in vLLM.

    Raises ConfigError and LoadError. Not thread-safe.
    """

    def __init__(self, model: str = "demo", **options: Any) -> None:
        self.config = fetched(engine_config({"model": model, **options}))
        self.tokenizer = tokenizer_of(self.config.model)
        # Not at the top: it imports torch, and the tokenizer's errors are raised before that.
        build = import_module("mtpserve.engine.startup.build")
        self.engine: Engine = build.build_engine(self.config, progress=sys.stderr.isatty())
        self.config = replace(self.config, spec=build.as_chosen(self.config.spec, self.engine.card))
        self._ids = itertools.count()
        self._late: list[TokenEvent] = []  # of steps that were read before a call

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

    @property
    def weight_version(self) -> str:
        return self.engine.weight_version

    def control(self, call: Call) -> Reply:
        """Has the engine do what an operator's call says, with no step in flight. Raises InvalidRequest and
        RequestFailed."""
        self._late += self.engine.settle()
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
        if sampling is not None and sampling_params is not None:
            raise InvalidRequest("give sampling or sampling_params, not both", "sampling_params")
        sampling = sampling_params if sampling is None else sampling
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
        if continue_final_message and add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message needs add_generation_prompt=False", "continue_final_message"
            )
        if not self.tokenizer.has_chat_template:
            raise InvalidRequest("this model has no chat template: use LLM.generate", "messages")
        if tools and not self.tokenizer.template_mentions("tools"):
            raise InvalidRequest(
                "tools: the model's chat template has no place for them; describe them in a system message",
                "tools",
            )
        prompts = [
            self.tokenizer.encode_chat(
                self.tokenizer.render_chat(
                    for_template(conversation),
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                    tools=[dict(tool) for tool in tools] if tools else None,
                    variables=chat_template_kwargs,
                )
            )
            for conversation in conversations_of(messages)
        ]
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
        try:
            for prompt, params, lora in zip(prompts, sampling, loras, strict=True):
                ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
                request = request_of(
                    spelling_of(self.tokenizer, params), f"offline-{next(self._ids)}", ids, params, lora=lora
                )
                detokenizer = Detokenizer(self.tokenizer.fast, params, self.engine.card.eos_ids, ids)
                outputs[request.id] = OfflineRequest(
                    self.tokenizer, detokenizer, len(ids), params,
                    sizes=self.engine.card.experts if params.return_routed_experts else None,
                )  # fmt: skip
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
        events, self._late = self._late, []
        for event in [*events, *self.engine.step()]:
            if event.id not in live:  # ended by a stop string, or by the caller
                continue
            step = outputs[event.id].take(event)
            if step.finish is not None:
                live.remove(event.id)
                if event.finish is None:
                    self.engine.abort(event.id)
            yield event.id, step


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
    result = EngineConfig(**{section: config(**values[section]) for section, config in sections.items()})
    for name, alone in (("data_parallel_size", 1), ("engine_restarts", None), ("engine_timeout", 20.0)):
        check(
            getattr(result.parallel, name) == alone,
            name,
            getattr(result.parallel, name),
            "left out: one engine computes in this process",
        )
    return result
