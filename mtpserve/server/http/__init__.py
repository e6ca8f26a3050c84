"""The layer between routes and wire: errors, keys, limits, event streams."""
