"""Engines and processes that compute together: the ranks of one model, and engines that share experts."""
