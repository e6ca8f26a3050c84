"""Routers that the kernels for experts are tested with: experts, how many a row takes, groups, how many of those; no groups: by softmax."""

ROUTES = [
    *((8, 2, 4, 2), (8, 2, 1, 1), (64, 6, 8, 3), (160, 6, 8, 3), (20, 20, 1, 1), (33, 3, 11, 1)),
    *((60, 4, 0, 0), (129, 8, 0, 0), (5, 5, 0, 0)),
]
