"""Triton kernels, each with a function in plain torch that says what it computes. Imports torch and triton, nothing of mtpserve."""
