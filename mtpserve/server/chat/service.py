"""What the routes share: admission, prompts to tokens, and one choice's generation, step by step. No answers
in HTTP and no JSON here."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Collection, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Annotated, Any

from fastapi import Depends, Request as HTTPRequest

from mtpserve.config import EngineConfig, ServerConfig
from mtpserve.core.errors import (
    EngineBusy,
    EngineDead,
    InvalidRequest,
    MTPServeError,
    RequestFailed,
    ShuttingDown,
)
from mtpserve.core.logs import non_default_fields
from mtpserve.core.plan import NOTHING_ALLOWED
from mtpserve.core.protocols.adapters import LoRARequest
from mtpserve.core.protocols.clients import EngineClient
from mtpserve.core.request import Request
from mtpserve.core.sampling import SamplingParams
from mtpserve.server.chat.formats import Formats
from mtpserve.server.chat.steps.patience import Patience, shorter
from mtpserve.server.chat.steps.step_output import StepOutput, StepReader
from mtpserve.server.chat.template_needs import Needs, needs_of
from mtpserve.server.http.errors import ContextLengthExceeded, ModelNotFound
from mtpserve.server.observe.history import RecentHistory
from mtpserve.server.observe.metrics import Metrics
from mtpserve.server.observe.observed import ROUTE, RequestClock, RequestObserver
from mtpserve.server.observe.tracing import Tracing
from mtpserve.server.schema.kv_transfer import Handover, TransferFields, handover_of
from mtpserve.text.chat_sampling import ChatSampling
from mtpserve.text.control import RenderedChat
from mtpserve.text.detokenizer import Detokenizer, Stops
from mtpserve.text.requests import Spelling, check_text, spelling_of
from mtpserve.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

MAX_BYTES_PER_TOKEN = 8  # a text with more bytes per token of the context is refused without tokenizing it
INLINE_BYTES = 4096  # shorter texts are tokenized at once, in less time than a thread takes to start
LOGGED_TOKENS = 256  # a prompt's, where prompts are logged


SGLANGS_NAME = "default"  # what its clients call any model


@dataclass(slots=True)
class Service:
    client: EngineClient
    tokenizer: Tokenizer
    metrics: Metrics
    created: int  # for /v1/models, in seconds since 1970
    engine_config: EngineConfig = field(default_factory=EngineConfig)
    server_config: ServerConfig = field(default_factory=ServerConfig)
    # variables of the chat template where a request has none
    template_defaults: dict[str, Any] = field(default_factory=dict)
    formats: Formats = field(default_factory=Formats)
    chat_sampling: ChatSampling = field(default_factory=ChatSampling)  # of chats that name none
    tracing: Tracing | None = None
    leaving: bool = False  # routers are to send new requests elsewhere; what comes is still served
    draining: bool = False
    history: RecentHistory = field(init=False)
    loras: dict[str, LoRARequest] = field(init=False)  # the adapters that requests may name
    num_loras: int = field(init=False)  # the last one's number
    lora_lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # one comes or goes at a time
    _live: dict[str, RequestClock] = field(default_factory=dict)  # what runs or waits, by the engine's ids
    _aborted: set[str] = field(default_factory=set)  # live requests that a client ended by their id
    _needs: Needs | None = None

    def __post_init__(self) -> None:
        self.history = RecentHistory(self.client.stats, self.metrics.latencies)
        requests = self.engine_config.lora.requests
        self.loras, self.num_loras = {lora.lora_name: lora for lora in requests}, len(requests)

    @property
    def model(self) -> str:
        return self.client.card.name

    @property
    def weight_version(self) -> str:
        """The operator's name of the weights, which answers have."""
        return self.client.stats().weight_version or "default"

    @property
    def names(self) -> tuple[str, ...]:
        """The model's names that requests may use; the first is its own."""
        return (self.model, *self.engine_config.model.served_model_name[1:])

    @property
    def template_needs(self) -> Needs:
        """Determined when a conversation first has tools."""
        if self._needs is None:
            self._needs = needs_of(
                lambda messages, tools: self.tokenizer.render_chat(messages, tools=tools).text
            )
        return self._needs

    def check_alive(self) -> None:
        if self.draining:
            raise ShuttingDown
        if self.client.dead is not None:
            raise EngineDead(self.client.dead)

    def check_ready(self) -> None:
        """What routers ask: whether new requests belong here."""
        self.check_alive()
        if self.leaving:
            raise ShuttingDown("the server is about to shut down: send new requests elsewhere")

    def admit(self, model: str | None) -> None:
        self.check_alive()
        self.check_model(model)

    def check_model(self, model: str | None) -> None:
        if model is not None and model not in (*self.names, SGLANGS_NAME, *self.loras):
            offered = ", ".join(map(repr, (*self.names, *self.loras)))
            raise ModelNotFound(
                f"the model {model[:200]!r} does not exist; this server offers {offered}", "model"
            )

    def lora_of(self, model: str | None) -> LoRARequest | None:
        """Returns the adapter that a request names as its model; None: it means the model itself."""
        return None if model is None or model in self.names else self.loras.get(model)

    # -- prompts ---------------------------------------------------------------------------------------------

    async def encode(self, text: str, field: str, *, special: bool) -> list[int]:
        if self.size(text, field) <= INLINE_BYTES:
            return self.tokenizer.encode(text, special=special)
        return await asyncio.to_thread(self.tokenizer.encode, text, special=special)

    async def encode_chat(self, chat: RenderedChat, *, special: bool = False) -> list[int]:
        if self.size(chat.text, "messages") <= INLINE_BYTES:
            return self.tokenizer.encode_chat(chat, special=special)
        return await asyncio.to_thread(self.tokenizer.encode_chat, chat, special=special)

    async def spelling(self, sampling: SamplingParams) -> Spelling:
        """Once for all choices of an answer. Raises InvalidRequest where constraints exclude each other."""
        size = sum(self.size(text, field) for field, text in sampling.texts())
        spelling = (
            spelling_of(self.tokenizer, sampling)
            if size <= INLINE_BYTES
            else await asyncio.to_thread(spelling_of, self.tokenizer, sampling)
        )
        sampling.check_allowed(spelling.bad_words, self.client.card.eos_ids)
        return spelling

    def size(self, text: str, field: str) -> int:
        """Bytes of a text. Raises InvalidRequest for more than any context takes."""
        check_text(text, field)
        size, limit = len(text.encode()), MAX_BYTES_PER_TOKEN * self.client.card.context_length
        if size > limit:
            raise self.too_long(f"{field} has {size} bytes, at most {limit} are tokenized", field)
        return size

    def too_long(self, what: str, field: str) -> ContextLengthExceeded:
        """The error for a long prompt. Coding agents look for its words, and shorten their conversation."""
        limit = f"this model's maximum context length is {self.client.card.context_length} tokens"
        return ContextLengthExceeded(f"prompt is too long: {what}; {limit}{self.why_less}", field)

    @property
    def why_less(self) -> str:
        """What limits the context, if it is not the model."""
        card = self.client.card
        if card.wanted_context <= card.context_length:
            return ""
        return (
            f" (the KV pool holds no more of the context of {card.wanted_context}: see "
            f"--max-total-tokens and --mem-fraction-static)"
        )

    def check_ids(self, ids: Sequence[int], field: str) -> None:
        vocab = self.client.card.vocab
        for id in ids:
            if not 0 <= id < vocab:
                raise InvalidRequest(
                    f"{field}: token {str(id)[:50]} is not in the vocabulary of {vocab}", field
                )

    def clamps(self, truncated: int | None) -> bool:
        """True if `max_tokens` is lowered to what is left of the context. A prompt that is `truncated` to
        what fits (-1) leaves as much as the client asks for."""
        return self.server_config.clamp_max_tokens and truncated != -1

    def check_sampling(self, sampling: SamplingParams, clamps: bool = False) -> None:
        """Before anything is tokenized: what cannot fit, and token ids that are not the model's. The engine
        checks them too, but a stream would have begun by then. `clamps`: any `max_tokens` will fit."""
        sampling.check_policy(self.engine_config.scheduler.scheduling_policy)
        sampling.check_experts(self.client.card.experts is not None)
        sampling.check_logprobs(self.server_config.max_logprobs)
        context = self.client.card.context_length
        if (sampling.max_tokens or 0) >= context and not clamps:
            max_tokens = str(sampling.max_tokens)[:50]
            raise ContextLengthExceeded(
                f"max_tokens must be below the context of {context}{self.why_less}, got {max_tokens}",
                "max_tokens",
            )
        self.check_ids(sampling.stop_token_ids, "stop_token_ids")
        self.check_ids(sampling.allowed_token_ids, "allowed_token_ids")
        self.check_ids(list(sampling.logit_bias), "logit_bias")

    def truncate(
        self, prompt: list[int], keep: int | None, max_tokens: int | None, first: bool = False
    ) -> list[int]:
        """The last `keep` tokens, or the `first` ones; -1: as many as fit in front of `max_tokens`, or of
        one."""
        if keep == -1:
            keep = self.client.card.context_length - (max_tokens or 1)
        if keep is None:
            return prompt
        return prompt[:keep] if first else prompt[-keep:]

    def handover(self, body: TransferFields) -> Handover:
        return handover_of(
            body, self.engine_config.disaggregation, self.engine_config.parallel.data_parallel_size
        )

    def check_length(self, prompt: Sequence[int], max_tokens: int | None, field: str) -> None:
        """An explicit `max_tokens` must fit after the prompt; without one the rest of the context is what
        there is."""
        context = self.client.card.context_length
        if not prompt:
            raise InvalidRequest(f"{field} is empty", field)
        if len(prompt) >= context:
            raise self.too_long(f"{len(prompt)} tokens > {context - 1} maximum in {field}", field)
        if len(prompt) + (max_tokens or 0) > context:
            both = f"{field} has {len(prompt)} tokens and max_tokens is {str(max_tokens)[:50]}"
            raise ContextLengthExceeded(
                f"{both}; together they exceed the context of {context}{self.why_less}", "max_tokens"
            )

    # -- generation ------------------------------------------------------------------------------------------

    def for_choice(self, sampling: SamplingParams, choice: int) -> SamplingParams:
        """The parameters of one choice. With a seed, choice j > 0 has a seed hashed from both: requests
        with the seeds 1, 2, 3 share no choice."""
        if sampling.seed is None or choice == 0:
            return sampling
        digest = blake2b(b"%d %d" % (sampling.seed, choice), digest_size=8).digest()
        return replace(sampling, seed=int.from_bytes(digest, "little", signed=True))

    @property
    def live(self) -> Collection[RequestClock]:
        return self._live.values()

    def abort(self, rid: str | None) -> int:
        """End what runs or waits under the id that the client knows, or all of it; returns how many choices
        that were.

        A choice's id in the engine is the client's, a dash, and its number.
        """
        running = [
            id for id in self._live.keys() - self._aborted if rid is None or id.rpartition("-")[0] == rid
        ]
        for id in running:
            self._aborted.add(id)
            self.client.abort(id)
        return len(running)

    async def generate(
        self,
        request: Request,
        arrival: float,
        timeout: float | None = None,
        *,
        streaming: bool = False,
        index: int = 0,
        stops: Stops | None = None,
    ) -> AsyncGenerator[list[StepOutput], None]:
        """StepOutputs until one has `finish`, all that have come since the last: one, unless they are read
        late. Closing it early, a stop string and any error all end the request in the engine.

        `arrival` is perf_counter's; `timeout` is in seconds from there, and the server's own may be shorter.
        `index` is the choice's in its answer; `stops` where its stop strings count, None: in all of the text.
        """
        clock = self._register(request, arrival, streaming)
        reader = self._step_reader(request, clock, index, stops)
        config = self.server_config
        patience = Patience(config.queue_timeout, shorter(config.request_timeout, timeout), arrival)
        arriving = self.client.submit(request)
        outcome = "abort"
        try:
            while reader.finish is None:
                limit = patience.limit(reader.started)
                try:
                    events = await (
                        anext(arriving)
                        if limit is None
                        else patience.wait(anext(arriving), limit, reader.started)
                    )
                except RequestFailed:
                    if request.id not in self._aborted:
                        raise
                    yield [reader.aborted()]
                    continue
                if steps := reader.read(events):
                    yield steps
                if reader.error is not None:
                    # what a request's own constraints exclude is its fault, and no failure
                    kind = InvalidRequest if reader.error.startswith(NOTHING_ALLOWED) else RequestFailed
                    raise kind(reader.error)
            outcome = reader.finish.value
        except StopAsyncIteration:
            outcome = "error"
            failure = RequestFailed("the engine ended the request without a reason")
            clock.fail(failure)
            raise failure from None
        except MTPServeError as error:
            outcome = "rejected" if isinstance(error, InvalidRequest | EngineBusy) else "error"
            clock.fail(error)
            raise
        finally:
            self.client.abort(request.id)
            del self._live[request.id]
            self._aborted.discard(request.id)
            clock.end(outcome)

    def _register(self, request: Request, arrival: float, streaming: bool) -> RequestClock:
        """Raises InvalidRequest where another request has the id."""
        if request.id in self._live:
            raise InvalidRequest(
                f"the id {request.id.rpartition('-')[0]!r} is that of another request that still runs", "rid"
            )
        route = ROUTE.get()
        observers: Sequence[RequestObserver] = self.metrics.observers
        if self.tracing is not None:
            observers = [*observers, self.tracing.request(route)]
        clock = RequestClock(observers, request, arrival, streaming, self.client.where, route)
        self._live[request.id] = clock
        self._log(request)
        return clock

    def _step_reader(
        self, request: Request, clock: RequestClock, index: int, stops: Stops | None
    ) -> StepReader:
        eos_ids = self.client.card.eos_ids
        detokenizer = Detokenizer(self.tokenizer.fast, request.sampling, eos_ids, request.prompt, stops)
        return StepReader(detokenizer, clock, index)

    def _log(self, request: Request) -> None:
        if self.server_config.log_requests:
            text = self.tokenizer.decode(request.prompt[:LOGGED_TOKENS], skip_special_tokens=False)
            size, sampling = len(request.prompt), non_default_fields(request.sampling)
            log.info(
                "request %s: %d prompt tokens, %r%s",
                request.id,
                size,
                text,
                "".join(f", {name}={value!r}" for name, value in sampling.items()),
                extra={
                    "engine_request_id": request.id,
                    "prompt_tokens": size,
                    "prompt": text,
                    "sampling": sampling,
                },
            )


async def get_service(request: HTTPRequest) -> Service:
    """The app's service; what it generates from here on came by this route."""
    ROUTE.set(request.scope["route"].path)
    service: Service = request.app.state.service
    return service


Served = Annotated[Service, Depends(get_service)]  # what routes ask for
