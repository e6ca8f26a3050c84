"""The streams of random numbers, which are keyed by (seed, index of the token, stream) and never by time.

A token's draft, its acceptance test and the sample that replaces it must be independent, so each has its own
stream. After a rejection, later indices use the same numbers again: no committed token depends on the earlier
use.
"""

DRAFT, COIN, DRAW = 0, 1, 2
# for spec/verify/synthetic: so large that its numbers are never those of another stream and index
LOT = 1 << 40
