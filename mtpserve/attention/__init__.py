"""Attention of ragged spans over pages, as one protocol: `plan(batch)` once a step, which gives each layer
its context."""
