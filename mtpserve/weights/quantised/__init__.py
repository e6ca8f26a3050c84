"""Matrices that a checkpoint stores quantised: the tensors of one, and its format."""
