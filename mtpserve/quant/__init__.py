"""How a matrix is stored, and how it is multiplied."""
