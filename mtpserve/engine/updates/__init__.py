"""Weights that change while the engine serves."""
