"""Text to tokens and back. Independent of the engine and of HTTP; imports no torch."""
