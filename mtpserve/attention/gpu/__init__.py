"""Attention by the Triton kernels."""
