"""Weights that change while the engine serves, pauses and sleeps."""
