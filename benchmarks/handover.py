"""How fast pages travel between two processes of this machine, by each way that --disaggregation-transfer-backend has.

python benchmarks/handover.py --json FILE

Two hundred scattered blocks of 64 KiB each, in host memory, as a decode node reads them from a prefill node: with the handshake, the lease
and the checksum of each page on both sides. The ways take turns. `nixl` only where it is installed (`pip install --no-deps nixl-cu12`): of
that the read itself is measured, too. UCX_TLS=tcp,posix,cma,self lets it use the machine's shared memory.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from statistics import median
from time import perf_counter

import torch
from common.record import save
from rich.console import Console
from rich.table import Table

from mtpserve.cache.leases import Leases
from mtpserve.core.errors import ConfigError
from mtpserve.core.kv_transfer import PageSource
from mtpserve.runtime.remote.client import PageClient, WantedPage
from mtpserve.runtime.remote.nixl import Nixl
from mtpserve.runtime.remote.server import PageServer
from mtpserve.runtime.remote.shared_memory import SharedBlocks

FACTS = {"what": "a measurement"}
WAYS = ("shm", "tcp", "nixl")
STRIDE = 7  # blocks are taken in another order than they lie in


def keys(count: int) -> list[bytes]:
    return [number.to_bytes(16, "big") for number in range(count)]


def agent(blocks: SharedBlocks) -> Nixl | None:
    try:
        return Nixl([blocks.tensor])
    except ConfigError:
        return None


def serve(pages: int, size: int) -> None:
    """In a process of its own: a lease for each line of standard input, until that ends."""
    blocks, leases = SharedBlocks([pages], [size], pin=False), Leases(60.0)
    torch.manual_seed(0)
    blocks.blocks[0].copy_(torch.randint(256, (pages, size), dtype=torch.uint8))
    server = PageServer("127.0.0.1", 0, FACTS, blocks, leases, agent(blocks))
    places = {(0, key): number * STRIDE % pages for number, key in enumerate(keys(pages))}
    print(server.port, flush=True)
    for line in sys.stdin:
        leases.offer(line.strip(), places)
        leases.take_ended()
        print(line, end="", flush=True)
    server.close()


class Measured:
    """Seconds of whole hand-overs, and of NIXL's reads alone."""

    def __init__(self, pages: int, size: int) -> None:
        self.blocks = SharedBlocks([pages], [size], pin=False)
        self.nixl = agent(self.blocks)
        self.seconds: dict[str, list[float]] = {way: [] for way in WAYS if way != "nixl" or self.nixl is not None}
        self.reads: list[float] = []
        if self.nixl is not None:
            read = self.nixl.read

            def timed(peer: bytes, places: list[tuple[int, int, int]], seconds: float) -> bool:
                began = perf_counter()
                done = read(peer, places, seconds)
                self.reads[-1] += perf_counter() - began
                return done

            self.nixl.read = timed  # type: ignore[method-assign, assignment]

    def fetch(self, client: PageClient, source: PageSource) -> float:
        self.blocks.blocks[0].zero_()
        self.reads.append(0.0)
        wanted = [
            WantedPage(0, key, block.numpy()) for key, block in zip(keys(len(self.blocks.blocks[0])), self.blocks.blocks[0], strict=True)
        ]
        began = perf_counter()
        missing = [why for why in client.fetch(source, wanted).missing if why]
        if missing:
            raise SystemExit(f"{len(missing)} pages did not arrive: {missing[0]}")
        return perf_counter() - began

    def run(self, rounds: int) -> None:
        pages, size = self.blocks.blocks[0].shape
        command = [sys.executable, __file__, "--serve", "--pages", str(pages), "--kib", str(size // 1024)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as node:
            assert node.stdin is not None and node.stdout is not None
            port = int(node.stdout.readline())
            clients = {way: PageClient(FACTS, 60.0, way, self.nixl if way == "nixl" else None) for way in self.seconds}
            for number in range(rounds + 2):  # the first ones connect and touch the memory
                for way, client in clients.items():
                    lease = f"{way}-{number}"
                    print(lease, file=node.stdin, flush=True)
                    node.stdout.readline()
                    took = self.fetch(client, PageSource("127.0.0.1", port, lease))
                    if number > 1:
                        self.seconds[way].append(took)
                    elif way == "nixl":
                        self.reads.clear()
            node.stdin.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", type=int, default=200)
    parser.add_argument("--kib", type=int, default=64, help="of a page")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--json")
    args = parser.parse_args()
    if args.serve:
        serve(args.pages, args.kib * 1024)
        return
    measured, size = Measured(args.pages, args.kib * 1024), args.pages * args.kib * 1024
    measured.run(args.rounds)
    found = dict(measured.seconds)
    if reads := [seconds for seconds in measured.reads if seconds]:
        found["nixl, its read alone"] = reads
    table = Table("way", "ms", "GB/s", "ms, quickest")
    rows = []
    for way, seconds in found.items():
        middle = median(seconds)
        row = {
            "way": way,
            "ms": round(1000 * middle, 2),
            "gb_per_s": round(size / middle / 1e9, 2),
            "least_ms": round(1000 * min(seconds), 2),
        }
        rows.append(row)
        table.add_row(*map(str, row.values()))
    Console().print(f"{args.pages} pages of {args.kib} KiB", table)
    save(args.json, {"pages": args.pages, "bytes": size, "rounds": args.rounds, "rows": rows})


if __name__ == "__main__":
    main()
