"""Text to tokens and back. Knows no engine and no HTTP, and imports no torch."""
