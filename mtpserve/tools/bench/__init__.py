"""`mtpserve bench`: the benchmarks by name."""
