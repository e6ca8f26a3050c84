"""The seams: a layer is given an object of one of these kinds, and works with any."""
