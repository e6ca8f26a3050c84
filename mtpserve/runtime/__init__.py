"""The step on the device: tensors of the running requests, spans to batch, forward, accept, propose,
publish."""
