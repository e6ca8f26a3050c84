"""`mtpserve doctor`: what this machine computes with, and whether its kernels are right."""
