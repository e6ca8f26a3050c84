"""Products with quantised weights."""
