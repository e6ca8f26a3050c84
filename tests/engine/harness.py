"""An engine over the fake runner, its requests, and the texts that they must get whatever the schedule."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from mtpserve.cache.groups import PageGroups
from mtpserve.config import SchedulerConfig
from mtpserve.core.protocols.observers import CacheObserver
from mtpserve.core.request import Request, TokenEvent
from mtpserve.core.sampling import GrammarSpec, SamplingParams
from mtpserve.engine.engine import Engine
from mtpserve.engine.grammars import PreparedGrammars
from mtpserve.engine.pages.kv_connector import KVConnector
from tests.engine.fake_runner import FakeRunner, draw, greedy_text

VOCAB = 50
PROMPTS = {f"r{i}": [draw("prompt", i, j, below=VOCAB) for j in range(1 + 5 * i % 17)] for i in range(8)}
OUTPUT = 24
REFERENCE = {name: greedy_text(prompt, OUTPUT, VOCAB) for name, prompt in PROMPTS.items()}


class Nothing:
    """core.protocols.GrammarCompiler whose grammars nobody looks at."""

    def compile(self, spec: GrammarSpec) -> Any:
        return None


class Bench:
    """An engine, its fake runner, and what each request got so far."""

    def __init__(
        self,
        *,
        drafts: int = 3,
        draft_depth: int | None = None,
        pages: int | tuple[int, ...] = 200,
        windows: tuple[int | None, ...] = (None,),
        page_size: int = 4,
        budget: int = 32,
        running: int = 4,
        queued: int | None = None,
        policy: str = "fcfs",
        random_seed: int | None = None,
        context: int = 200,
        eos: tuple[int, ...] = (),
        accuracy: float = 0.7,
        noisy: bool = False,
        overlap: int = 0,
        plain_above: int | None = None,
        cache: bool = True,
        observer: CacheObserver | None = None,
        host: int | None = None,  # blocks of host memory; None: no tiers
        disk: bool = False,
        **scheduler: object,
    ) -> None:
        scheduler = {"schedule_conservativeness": 0.0} | scheduler  # more is preempted, and tested
        counts = (pages,) if isinstance(pages, int) else pages
        self.runner = FakeRunner(
            max_drafts=drafts, num_pages=counts, windows=windows, page_size=page_size, accuracy=accuracy, noisy=noisy
        )  # fmt: skip
        pages_of = PageGroups(windows, counts, page_size, budget)
        self.engine = Engine(
            self.runner,
            SchedulerConfig(
                chunked_prefill_size=budget,
                max_queued_requests=queued,
                scheduling_policy=policy,
                random_seed=random_seed,
                **scheduler,  # type: ignore[arg-type]
            ),
            pages=pages_of,
            kv_connector=None if host is None else KVConnector(pages_of, [host] * len(counts), self.runner.disk if disk else None),
            max_running=running,
            context_length=context,
            vocab=VOCAB,
            eos_ids=eos,
            draft_depth=drafts if draft_depth is None else draft_depth,
            overlap=overlap,
            plain_above=plain_above,
            grammars=PreparedGrammars(Nothing()),
            fingerprint=b"" if cache else None,
            observer=observer,
        )
        self.overlap = overlap
        self.texts: dict[str, list[int]] = defaultdict(list)
        self.last: dict[str, TokenEvent] = {}

    def add(self, name: str, prompt: list[int] | None = None, max_tokens: int | None = OUTPUT, salt: str = "", **sampling: object) -> None:
        params = SamplingParams(max_tokens=max_tokens, **sampling)  # type: ignore[arg-type]
        self.engine.add(Request(name, PROMPTS[name] if prompt is None else prompt, params, salt=salt))

    def step(self) -> list[TokenEvent]:
        events = self.engine.step()
        assert self.overlap or len({event.id for event in events}) == len(events)
        for event in events:
            assert "AssertionError" not in (event.error or ""), "the runner's own checks failed, see the log"
            assert event.id not in self.last or self.last[event.id].finish is None, "an event behind the end"
            assert event.tokens or event.finish is not None
            assert (
                event.num_accepted_tokens <= len(event.tokens)
                and event.proposal.tokens[: event.num_accepted_tokens] == event.tokens[: event.num_accepted_tokens]
            )
            self.texts[event.id] += event.tokens
            self.last[event.id] = event
        self.engine.check_integrity()
        return events

    def drain(self, limit: int = 3000) -> None:
        for _ in range(limit):
            if not self.engine.has_work:
                break
            self.step()
        stats = self.engine.stats
        assert (stats.running, stats.waiting, stats.pages_used) == (0, 0, 0), "not idle after so many steps"
