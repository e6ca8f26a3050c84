"""Low-rank adapters of a model (LoRA), as requests name them."""

from __future__ import annotations

import msgspec


class LoRARequest(msgspec.Struct, frozen=True, order=False):
    """An adapter that a request is computed with; names and order of the fields are vLLM's.

    `lora_int_id` counts from 1 and is one load's: an adapter that is loaded again, under the same name or
    another one, has another number. `lora_path`: a directory as PEFT saves it."""

    lora_name: str
    lora_int_id: int
    lora_path: str
