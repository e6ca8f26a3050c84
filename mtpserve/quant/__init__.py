"""How a matrix is stored, and how it becomes numbers again."""
