"""Attention of ragged spans over pages: `span_gqa` and `span_mla`, one kernel and its combining pass."""
