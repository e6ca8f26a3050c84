"""The parts of peers/gpu.py. What a worker imports needs the standard library alone, and its engine: each engine has its own interpreter."""
