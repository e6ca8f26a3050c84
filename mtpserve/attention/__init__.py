"""Attention of ragged spans over pages, behind one protocol: `plan(batch)` once a step, then one call per layer."""
