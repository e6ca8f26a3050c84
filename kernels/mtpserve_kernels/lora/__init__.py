"""Low-rank adapters of linear layers: several in one batch."""
