"""Pages read from another node: one serves what its leases hold, the other one asks for them by key."""
