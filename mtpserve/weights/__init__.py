"""The way from a published checkpoint directory to a module's parameters: its config, its tensors, and the
rules that map names to parameters."""
