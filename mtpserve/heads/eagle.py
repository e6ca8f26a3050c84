"""EAGLE heads (https://arxiv.org/abs/2401.15077)."""

from __future__ import annotations

from typing import cast

from mtpserve.core.protocols import DraftModel, Trunk
from mtpserve.heads.head import Separate
from mtpserve.layers.decoder import DecoderModel


class Eagle(Separate):
    """core.protocols.DraftSource. Without a head of its own, EAGLE means the checkpoint's MTP layer."""

    def in_checkpoint(self, path: str | None) -> bool:
        return True

    def build(self, trunk: Trunk) -> DraftModel:
        whole = cast(DecoderModel, trunk)
        return super().build(trunk) if whole.mtp_head is None else cast(DraftModel, whole.mtp_head)


EAGLE = Eagle()
