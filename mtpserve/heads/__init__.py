"""Draft models that are published apart from the models that they draft for."""
