"""Small operations around the matrix products, each one launch."""
