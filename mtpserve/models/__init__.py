"""One file per family: what its config means, which blocks it is made of, and what its checkpoint's tensors are called."""
