"""Plan, run, commit: which requests a step computes and what its result means for them. No tensors here."""
