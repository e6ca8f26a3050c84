"""One request on the host, from its arrival to its end: what the scheduler counts, and what other
rooms keep with it.
"""
