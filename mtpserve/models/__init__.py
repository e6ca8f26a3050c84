"""One file per family: its architecture from the config, its blocks, and the names of its checkpoint's
tensors."""
