"""What may change while an engine serves."""
