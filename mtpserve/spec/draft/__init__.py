"""Drafters: what the next step verifies, as a chain or a tree."""
