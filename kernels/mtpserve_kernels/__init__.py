"""Triton kernels, each beside the plain torch function that says what it computes. Imports torch and triton, nothing of mtpserve."""
