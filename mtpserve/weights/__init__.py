"""From a published checkpoint directory to a module's parameters: its config, its tensors, and the rules that pair the two."""
