"""A model that is a table: the next token's logits depend on the last token alone. Its laws can be written down exactly.

The trunk and the MTP head have a table each, alike enough for drafts to be accepted and different enough for them to be refused.
Everything around it is the engine's own: scheduler, seats, rules, drafters, acceptance.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from mtpserve_kernels.cpu.library import Unavailable, library
from torch import Tensor

from mtpserve.attention.registry import BACKENDS
from mtpserve.config import SamplingConfig, SchedulerConfig, SpecConfig
from mtpserve.core.arch.model import Attention, Features, KVLayout, LayerKind
from mtpserve.core.batch import Batch, Hidden
from mtpserve.core.protocols.logits_processor import LogitsProcessor
from mtpserve.core.request import Request
from mtpserve.core.sampling import SamplingParams
from mtpserve.engine.engine import Engine
from mtpserve.engine.startup.assemble import KERNELS, EngineOptions, EngineSizes, assemble
from mtpserve.spec.sizes import spec_sizes
from tests.grammars import TokenGrammar

VOCAB, EOS = 6, 5
PAGE = 64


@cache
def tables() -> Tensor:
    """[2 VOCAB, VOCAB]: the trunk's logits, then the MTP head's."""
    generator = torch.Generator().manual_seed(8)
    trunk = 1.5 * torch.randn(VOCAB, VOCAB, generator=generator)
    return torch.cat([trunk, trunk + 0.7 * torch.randn(VOCAB, VOCAB, generator=generator)])


class TableHead:
    """core.protocols.models.DraftModel"""

    lag, features, layers, at_once, mask, tokens = 1, Features(last="post"), (), False, None, None

    def extend(self, ids: Tensor, positions: Tensor, features: Tensor, contexts: object) -> Hidden:
        state = ids.float().unsqueeze(1) + VOCAB
        return Hidden(state, state)

    step = extend

    def store_kv(self, ids: Tensor, positions: Tensor, features: Tensor, contexts: object) -> None:
        """Its rows depend on no others."""

    def logits(self, head: Tensor, depth: int) -> Tensor:
        return tables()[head.squeeze(1).long()]


class TableModel:
    """core.protocols.Trunk; a hidden state is the number of a row of `tables`."""

    arch: Any = SimpleNamespace(
        layers=(Attention(KVLayout("gqa", 1, 1, 1)),), num_layers=1, hidden=1, residual=1, heads=1, scale=1.0, vocab=VOCAB, draft=None,
    )  # fmt: skip

    mtp_head = TableHead()

    def trunk(self, ids: Tensor, positions: Tensor, contexts: object, features: Features) -> Hidden:
        state = ids.float().unsqueeze(1)
        return Hidden(state, state)

    def logits(self, head: Tensor) -> Tensor:
        return tables()[head.squeeze(1).long()]


class NoAttention:
    graph_safe = exact = False

    def __init__(self, stores: Any, heads: int, scale: float) -> None:
        pass

    def supports(self, kind: LayerKind) -> bool:
        return True

    def plan(self, batch: Batch) -> Any:
        return None


def kernels() -> dict[str, str]:
    """What decides and proposes on a CPU, where it can run: tests/kernels compare it with plain torch, here it must obey the laws."""
    try:
        library()
    except Unavailable:
        return {}
    return {name: KERNELS["cpu"][name] for name in ("verify", "propose")}


def table_engine(
    spec: SpecConfig, seats: int, processors: Seq[LogitsProcessor] = (), grammars: Any = None, processed: bool = False
) -> Engine:
    model: Any = TableModel()
    budget = max(seats * 8, 64)
    lookahead = spec_sizes(spec, budget).num_lookahead_tokens(0)
    with BACKENDS.extended("none", "tests.parity.table:NoAttention"), pytest.MonkeyPatch.context() as patch:
        patch.setitem(KERNELS, "none", kernels())
        engine = assemble(
            model,
            EngineSizes(pages=[seats * (1 + (80 + lookahead) // PAGE)], page_size=PAGE, max_num_reqs=seats, context=80),
            EngineOptions(
                spec=spec,
                scheduler=SchedulerConfig(chunked_prefill_size=budget),
                sampling=SamplingConfig(logprobs_mode="processed_logprobs" if processed else "raw_logprobs"),
                backend="none",
                eos_ids=(EOS,),
                processors=processors,
                grammars=grammars,
            ),
        )
    if engine.policy is not None:
        engine.policy.forced_depth = spec.steps  # it would not draft at all where that takes longer, and laws are held to drafts
    return engine


def run(engine: Engine, requests: Seq[Request]) -> list[list[int]]:
    """All at once → the tokens of each. A request that fails fails the test."""
    for request in requests:
        engine.add(request)
    tokens: dict[str, list[int]] = {request.id: [] for request in requests}
    while engine.has_work:
        for event in engine.step():
            assert event.error is None, event.error
            tokens[event.id] += event.tokens
    engine.check_integrity()
    assert engine.stats.pages_used == 0
    return list(tokens.values())


class Halving:
    """A processor that looks at the whole path: it forbids the token of two places before, and halves even tokens after an even sum."""

    def __call__(self, tokens: list[int], prompt_len: int, params: Any, logits: Tensor) -> Tensor:
        logits = logits.clone()
        if params.get("halve"):
            logits[tokens[-2:][0]] = -torch.inf
            if sum(tokens) % 2 == 0:
                logits[::2] -= 0.7
        return logits


class Alternating(TokenGrammar):
    """The output never repeats its last token, and after `most` tokens it ends."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def allowed(self, output: Seq[int]) -> set[int]:
        if len(output) >= self.most or EOS in output:
            return {EOS}
        return set(range(VOCAB)) - set(output[-1:]) - ({EOS} if len(output) < 2 else set())


class Alternatings:
    def compile(self, spec: Any) -> Alternating:
        return Alternating(int(spec.text))


def law(tokens: Seq[int], prompt_len: int, params: SamplingParams, bad_words: Seq[Seq[int]] = ()) -> np.ndarray:  # type: ignore[type-arg]
    """The oracle: [VOCAB], the distribution of what follows, rule after rule in plain numpy."""
    output = list(tokens[prompt_len:])
    x = tables()[tokens[-1]].double().numpy().copy()
    for token, bias in params.logit_bias.items():
        x[token] += bias
    if params.allowed_token_ids:
        x[[t for t in range(VOCAB) if t not in params.allowed_token_ids]] = -np.inf
    for word in bad_words:
        if len(word) == 1 or output[-len(word) + 1 :] == list(word[:-1]):
            x[word[-1]] = -np.inf
    if len(output) < params.min_tokens:
        x[list({*params.stop_token_ids, *(() if params.ignore_eos else (EOS,))})] = -np.inf
    for token in range(VOCAB):
        if token in tokens:
            x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
        x[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty * (token in output)
    if params.custom_params:
        x = Halving()(list(tokens), prompt_len, params.custom_params, torch.from_numpy(x)).numpy()
    if params.grammar is not None:
        allowed = Alternating(int(params.grammar.text)).allowed(output)
        x[[t for t in range(VOCAB) if t not in allowed]] = -np.inf
    if params.greedy:
        return np.eye(VOCAB)[int(x.argmax())]
    p = np.exp((x - x.max()) / params.temperature)
    order = np.argsort(-p, kind="stable")
    if params.top_k > 0:
        p[order[params.top_k :]] = 0
    p /= p.sum()
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= params.top_p]] = 0
    p /= p.sum()
    p[p < params.min_p * p.max()] = 0
    return np.asarray(p / p.sum())


def greedy_text(prompt: Seq[int], params: SamplingParams, bad_words: Seq[Seq[int]] = ()) -> list[int]:
    tokens = list(prompt)
    for count in range(1, (params.max_tokens or 1) + 1):
        tokens.append(int(law(tokens, len(prompt), params, bad_words).argmax()))
        if tokens[-1] in params.stop_token_ids or (tokens[-1] == EOS and not params.ignore_eos):
            break
        assert count
    return tokens[len(prompt) :]


def joint(prompt: Seq[int], params: SamplingParams, bad_words: Seq[Seq[int]], length: int) -> dict[tuple[int, ...], float]:
    """The exact probability of every output of `length` tokens, or fewer where it stops."""
    found: dict[tuple[int, ...], float] = {}
    open_ends: dict[tuple[int, ...], float] = {(): 1.0}
    for place in range(length):
        longer: dict[tuple[int, ...], float] = {}
        for output, chance in open_ends.items():
            for token, p in enumerate(law([*prompt, *output], len(prompt), params, bad_words)):
                if p > 0:
                    longer[*output, token] = chance * float(p)
        ended = {o for o in longer if o[-1] in params.stop_token_ids or (o[-1] == EOS and not params.ignore_eos) or place == length - 1}
        found |= {output: longer.pop(output) for output in ended}
        open_ends = longer
    return found
