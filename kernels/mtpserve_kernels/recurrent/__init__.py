"""Layers that keep a state of fixed size for each request instead of keys and values of all its tokens."""
