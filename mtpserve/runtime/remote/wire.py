"""What the two nodes say to each other over one TCP connection for each request: messages with their length
in front, then bytes of pages.

    reader → Hello        ← Hello       both compare all that pages depend on
    reader → WantPages    ← Give …      some pages in each, so that one node reads what the other one has
                                        checked; by TCP with their bytes
    reader → Done

With the last one the lease ends.
"""

from __future__ import annotations

import socket
import struct
from typing import TypeVar

import msgspec

from mtpserve.runtime.remote.shared_memory import Address

VERSION = "1"  # the version of these messages
LENGTH = struct.Struct(">I")
LONGEST = 1 << 26  # bytes of one message

M = TypeVar("M")


class Hello(msgspec.Struct, frozen=True, array_like=True):
    """`facts`: what pages depend on besides tokens, by names for people, and this protocol's version."""

    facts: dict[str, str]
    memory: Address | None = None  # memory of the node that has the pages
    nixl: bytes = b""  # its agent, if it has one
    base: int = 0  # where its memory begins, for this agent


class WantPages(msgspec.Struct, frozen=True, array_like=True):
    """Pages by group and key."""

    lease: str
    waits: bool
    seconds: float
    pages: list[tuple[int, bytes]]
    copies: bool  # the reader takes them from memory itself


class PageEntry(msgspec.Struct, frozen=True, array_like=True):
    index: int  # the wanted page's number
    start: int  # where its bytes begin in memory
    checksum: int


class Give(msgspec.Struct, frozen=True, array_like=True):
    """Some of the wanted pages that are there; `more` says that others follow. `has_lease`: the sender has
    the lease."""

    has_lease: bool
    pages: list[PageEntry]
    more: bool = False


class Done(msgspec.Struct, frozen=True, array_like=True):
    pages: int
    bytes: int
    seconds: float


def differing(ours: dict[str, str], theirs: dict[str, str]) -> str | None:
    """The first fact in which two nodes differ, for people."""
    for name in [*ours, *(name for name in theirs if name not in ours)]:
        if ours.get(name) != theirs.get(name):
            return f"{name}: {ours.get(name, 'unknown')} here, {theirs.get(name, 'unknown')} there"
    return None


def send(connection: socket.socket, message: msgspec.Struct) -> None:
    body = msgspec.msgpack.encode(message)
    connection.sendall(LENGTH.pack(len(body)) + body)


def receive(connection: socket.socket, kind: type[M]) -> M:
    """Raises OSError where the connection ends or waits for too long, ValueError for what is no such
    message."""
    (length,) = LENGTH.unpack(receive_into(connection, memoryview(bytearray(LENGTH.size))))
    if length > LONGEST:
        raise ValueError(f"a message of {length} bytes")
    body = receive_into(connection, memoryview(bytearray(length)))
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except msgspec.MsgspecError as error:
        raise ValueError(f"not a message of this protocol: {error}") from error


def receive_into(connection: socket.socket, target: memoryview) -> memoryview:
    """All of it."""
    done = 0
    while done < len(target):
        count = connection.recv_into(target[done:])
        if count == 0:
            raise ConnectionError("the other node closed the connection")
        done += count
    return target
