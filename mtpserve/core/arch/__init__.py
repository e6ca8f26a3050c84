"""A model's dimensions."""
