"""What lies between the routes and the wire: errors, keys, limits, event streams."""
