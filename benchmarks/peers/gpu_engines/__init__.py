"""The parts of peers/gpu.py. A worker imports the standard library and its engine alone: each engine has its own interpreter."""
