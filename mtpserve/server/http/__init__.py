"""Between the routes and the wire: errors, keys, limits, event streams."""
