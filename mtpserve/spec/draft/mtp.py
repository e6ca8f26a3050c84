"""Drafting with the checkpoint's own multi-token-prediction layer: see layers.decoder.MTPHead."""

from __future__ import annotations

from typing import cast

from mtpserve.core.protocols.models import DraftModel, Trunk
from mtpserve.layers.decoder import DecoderModel


class OwnLayer:
    """core.protocols.DraftSource."""

    def in_checkpoint(self, path: str | None) -> bool:
        return True

    def build(self, trunk: Trunk) -> DraftModel:
        layer = cast(DecoderModel, trunk).mtp_head
        assert layer is not None
        return cast(DraftModel, layer)


MTP = OwnLayer()
