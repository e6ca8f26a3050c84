"""The kernels of a CPU: C++ with one header of vector primitives per instruction set, compiled once and called through ctypes.

src/ has no header of torch's or Python's: an object is a plain shared library, of any Python and torch, and compiles in seconds.
"""
