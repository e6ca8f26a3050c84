"""Routes that load and unload adapters: vLLM's, which answer with a sentence, and SGLang's with an object."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field
from starlette.responses import PlainTextResponse, Response

from mtpserve.core.errors import InvalidRequest
from mtpserve.core.protocols.adapters import LoRARequest
from mtpserve.core.protocols.control import LoadLoRA, UnloadLoRA
from mtpserve.server.chat.service import SGLANGS_NAME, Served, Service
from mtpserve.server.http.errors import ModelNotFound, Unsupported
from mtpserve.server.http.rendering import JSON, Rendered
from mtpserve.server.schema.base import Strict
from mtpserve.server.schema.shapes import Schema


class LoadedAdapters(Rendered):
    success: Literal[True]
    loaded_adapters: dict[str, str]  # their directories by name


class LoadLoRABody(Strict):
    """`lora_path`: a directory of the machine on which the engines run, as PEFT saves an adapter."""

    shapes: ClassVar[dict[str, Schema]] = {"pinned": {"enum": [False]}}

    lora_name: Annotated[str, Field(min_length=1, max_length=512)]
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]
    load_inplace: bool | None = None
    pinned: bool | None = None

    def check(self) -> None:
        if self.pinned:
            raise Unsupported("pinned is not supported: leave it out, or raise --max-loras", "pinned")


class UnloadLoRABody(Strict):
    lora_name: Annotated[str, Field(min_length=1, max_length=512)]


async def load(service: Service, body: LoadLoRABody) -> None:
    """Raises InvalidRequest where an engine cannot read the adapter; then no engine has it."""
    service.check_alive()
    body.check()
    name, loras = body.lora_name, service.loras
    if not service.engine_config.lora.is_enabled:
        raise InvalidRequest(f"the adapter {name!r} needs a server with --enable-lora", "lora_name")
    if name in (*service.names, SGLANGS_NAME):
        raise InvalidRequest(f"lora_name {name!r} is the name of the model: choose another", "lora_name")
    async with service.lora_lock:
        before = loras.get(name)
        if before is not None and not body.load_inplace:
            raise InvalidRequest(
                f"the adapter {name!r} is loaded already: unload it first, or set load_inplace", "lora_name"
            )
        service.num_loras += 1
        request = LoRARequest(name, service.num_loras, body.lora_path)
        try:
            await service.client.control(LoadLoRA(request))
        except InvalidRequest as error:
            await service.client.control(UnloadLoRA(request.lora_int_id))
            raise InvalidRequest(str(error), "lora_path") from None
        loras[name] = request
        if before is not None:
            await service.client.control(UnloadLoRA(before.lora_int_id))


async def unload(service: Service, body: UnloadLoRABody) -> None:
    """New requests do not find it. Raises ModelNotFound."""
    service.check_alive()
    async with service.lora_lock:
        request = service.loras.pop(body.lora_name, None)
        if request is None:
            raise ModelNotFound(f"the adapter {body.lora_name[:200]!r} is not loaded", "lora_name")
        await service.client.control(UnloadLoRA(request.lora_int_id))


def loaded(service: Service) -> Response:
    return JSON(LoadedAdapters(True, {lora.lora_name: lora.lora_path for lora in service.loras.values()}))


async def load_lora(service: Served, body: LoadLoRABody) -> Response:
    """Load an adapter into all engines. Requests then find it as a model."""
    await load(service, body)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


async def unload_lora(service: Served, body: UnloadLoRABody) -> Response:
    """Unload an adapter. Requests that run or wait go on with it."""
    await unload(service, body)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


async def load_lora_adapter(service: Served, body: LoadLoRABody) -> Response:
    """Load an adapter into all engines, in SGLang's form."""
    await load(service, body)
    return loaded(service)


async def unload_lora_adapter(service: Served, body: UnloadLoRABody) -> Response:
    """Unload an adapter, in SGLang's form."""
    await unload(service, body)
    return loaded(service)
