"""Logits to tokens: sampling parameters, rules for the output, and grammars' masks."""
