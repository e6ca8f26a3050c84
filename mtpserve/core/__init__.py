"""The vocabulary: plain dataclasses and protocols that every layer shares. Imports nothing of ours and no torch at run time."""
