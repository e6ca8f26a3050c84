"""Commands beside the server: benchmarks, simulations, proofs, recordings and checkpoint reports. Nothing
imports them."""
