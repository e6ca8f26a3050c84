"""Mixtures of experts: the router, and the experts' products over a few rows or many."""
