"""Shared parts of the benchmarks. Benchmarks are run by hand, one at a time on an idle machine; tests never time anything."""
