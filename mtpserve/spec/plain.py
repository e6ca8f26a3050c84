"""Requests that are not to be drafted for: how to say so to a server of ours and to the offline engine, and
whether it matters."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from mtpserve.core.request import ModelCard
from mtpserve.core.sampling import SamplingParams, Speculation

PLAIN_FIELDS = {"speculative": {"enabled": False}}  # fields of a request over HTTP
HOW = "--speculative-algorithm NEXTN"  # the option that makes a difference


class ListedSteps(msgspec.Struct):
    """An entry of /v1/models. Other servers do not say."""

    id: str = ""
    speculative_steps: int = 0


def plainly(params: SamplingParams) -> SamplingParams:
    return replace(params, speculation=Speculation(enabled=False))


def looks_ahead(card: ModelCard | ListedSteps) -> bool:
    """True if requests are drafted for at all."""
    return card.speculative_steps > 0
