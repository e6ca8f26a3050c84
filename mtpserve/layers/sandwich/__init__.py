"""Layers whose blocks are normed before and after, as Gemma 4 has them."""
