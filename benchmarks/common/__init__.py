"""What the benchmarks share. Benchmarks are run by hand, one at a time on an idle machine; tests never time anything."""
