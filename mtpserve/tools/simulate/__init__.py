"""The scheduler and the cache in simulated time, and answers without a model."""
