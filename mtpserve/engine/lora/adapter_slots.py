"""Which adapters have a slot on the device, and which may get one.

    loaded   any number, in host memory
    slots    a few, which the layers read; more adapters than slots take turns

An adapter keeps its slot until another one needs it: then the one goes that nobody uses and that was used
least recently. A request whose adapter gets no slot waits; so do later requests with adapters that have none,
or the slots would never be free for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from mtpserve.core.errors import InvalidRequest
from mtpserve.core.protocols.adapters import LoRARequest


def no_adapters(request: LoRARequest) -> bytes:
    raise InvalidRequest(
        f"the adapter {request.lora_name!r} needs an engine with --enable-lora or --lora-modules", "model"
    )


class AdapterSlots:
    """An engine's. Without `open` there are none, and requests with an adapter are refused."""

    def __init__(self) -> None:
        self._read: Callable[[LoRARequest], bytes] = no_adapters
        self._drop: Callable[[int], None] = lambda number: None
        self._requests: dict[int, LoRARequest] = {}  # those that are loaded, by lora_int_id
        self._fingerprints: dict[int, bytes] = {}  # of their numbers
        self._retired: set[int] = set()  # of these, those that no new request has
        self._free: list[int] = []
        self._slots: dict[int, int] = {}  # lora_int_id → slot, the least recently used first
        self._live: Counter[int] = Counter()  # requests that run or wait, by lora_int_id
        self._users: Counter[int] = Counter()  # those that run

    def open(self, slots: int, read: Callable[[LoRARequest], bytes], drop: Callable[[int], None]) -> None:
        """`read`: reads an adapter, in all ranks, and returns the fingerprint of its numbers; it may raise
        InvalidRequest. `drop`: the opposite."""
        self._free, self._read, self._drop = list(reversed(range(slots))), read, drop

    def load(self, request: LoRARequest) -> None:
        """Loads an adapter, unless it is there. Raises InvalidRequest."""
        loaded = self._requests.setdefault(request.lora_int_id, request)
        if loaded != request:
            raise InvalidRequest(
                f"lora_int_id {request.lora_int_id} is that of the adapter {loaded.lora_name!r} in "
                f"{loaded.lora_path}: give {request.lora_name!r} another number",
                "lora_int_id",
            )
        if request.lora_int_id not in self._fingerprints:
            try:
                self._fingerprints[request.lora_int_id] = self._read(request)
            except BaseException:
                del self._requests[request.lora_int_id]
                raise

    def require(self, request: LoRARequest | None) -> None:
        """A request arrives. Raises InvalidRequest."""
        if request is not None:
            self.load(request)
            self._live[request.lora_int_id] += 1

    def leave(self, request: LoRARequest | None) -> None:
        """A request has ended."""
        if request is not None:
            self._live[request.lora_int_id] -= 1
            self._drop_retired(request.lora_int_id)

    def retire(self, lora_int_id: int) -> None:
        """No new request has it. It is dropped once none that lives has it."""
        self._retired.add(lora_int_id)
        self._drop_retired(lora_int_id)

    def _drop_retired(self, number: int) -> None:
        if number not in self._retired or self._live[number]:
            return
        self._retired.remove(number)
        if (slot := self._slots.pop(number, None)) is not None:
            self._free.append(slot)
        if self._requests.pop(number, None) is not None:
            del self._fingerprints[number]
            self._drop(number)

    def fingerprint(self, request: LoRARequest | None) -> bytes:
        """What keys and values depend on besides tokens and the model."""
        return b"" if request is None else self._fingerprints[request.lora_int_id]

    def has_room(self, request: LoRARequest) -> bool:
        """It has a slot, or can get one."""
        return (
            request.lora_int_id in self._slots
            or bool(self._free)
            or any(not self._users[number] for number in self._slots)
        )

    def seat(self, request: LoRARequest | None) -> int:
        """A request starts. Returns the slot of its adapter, -1 for none."""
        if request is None:
            return -1
        number = request.lora_int_id
        slot = self._slots.pop(number, None)
        if slot is None and self._free:
            slot = self._free.pop()
        elif slot is None:
            slot = self._slots.pop(next(other for other in self._slots if not self._users[other]))
        self._slots[number] = slot
        self._users[number] += 1
        return slot

    def release(self, request: LoRARequest | None) -> None:
        """It runs no more."""
        if request is not None:
            self._users[request.lora_int_id] -= 1
