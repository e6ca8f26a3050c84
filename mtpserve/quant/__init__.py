"""The storage of a matrix, and its product."""
