"""Every kernel of a device compared with its reference in plain torch, on small random input."""
