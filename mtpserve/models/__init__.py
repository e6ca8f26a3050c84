"""The model families, one file each: its architecture from the config, its blocks, and the names of its
checkpoint's tensors."""
