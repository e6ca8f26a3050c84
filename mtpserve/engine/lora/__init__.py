"""Adapters as the scheduler sees them."""
