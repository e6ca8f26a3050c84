"""What the page accounting, the prefix cache and the transfer of pages keep of one request."""

from __future__ import annotations

from dataclasses import dataclass, field

from mtpserve.core.kv_transfer import PageOffer


@dataclass(slots=True)
class BlockList:
    """A request's pages of one group: those of the blocks of its block table from `first` on."""

    first: int = 0
    pages: list[int] = field(default_factory=list)
    planned_end: int = 0  # the block after the last that a plan has named: the runner knows those before it

    @property
    def end(self) -> int:
        """The block after the last."""
        return self.first + len(self.pages)


@dataclass(slots=True)
class CacheState:
    """A block is an index into the request's block table; see `cache/keys` for the keys of whole blocks."""

    blocks: list[BlockList] = field(default_factory=list)  # by group of pages; empty while the request waits
    has_new_blocks: bool = False  # it holds pages that no plan has named
    hash_root: bytes | None = None  # what the key of its first block continues; None: it shares no pages
    # keys of the prompt's blocks, and of those computed since
    block_hashes: list[bytes] = field(default_factory=list)
    num_hashed_blocks: int = 0  # blocks whose pages have their keys
    num_verified_blocks: int = 0  # hashed blocks whose contents are known to be finite numbers
    num_matched_blocks: int = 0  # `block_hashes` that the last lookup found
    # Tokens in pages that another request has computed. One of them may be computed again, and is not stored.
    num_shared_tokens: int = 0
    num_cached_tokens: int = 0  # prompt tokens that were found when the request first ran
    # Computed tokens whose KV all models have stored: all, or all but deferred ones.
    num_stored_tokens: int = 0
    # Tokens in the states of recurrent layers: without those that the last step accepted.
    num_state_tokens: int = 0
    checkpoint_blocks: list[int] = field(default_factory=list)  # ascending; the state after each is kept
    # the checkpoint block after which the request leaves what was computed before; 0: none
    branch_block: int = 0
    start_state: int = -1  # the kept state from which it starts; -1: it starts with its first token
    kv_load: int = 0  # number of the last load of pages that it has waited for
    num_kv_loads: int = 0  # loads that it has waited for since it runs
    kv_transfers: frozenset[int] | None = (
        None  # transfers from another node that it waits for; None: none asked for
    )
    kv_offer: PageOffer | None = None  # pages of its prompt that another node may read once it has ended
