"""Pages that requests share: prefixes, host memory and disk, other nodes' pages, and the events that routers
read."""
