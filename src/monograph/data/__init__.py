"""Turn text into batches: find documents, tokenise them once, pack them into rows, and visit the
rows in a fixed order.
"""

# The largest share of the bytes that may be held out. With a larger one, there would be less to
# train on than to measure on.
MAX_HELD_OUT = 0.5
# The bounds of a source's weight: the number of times that an epoch sees the source.
MIN_WEIGHT = 1e-3
MAX_WEIGHT = 1e3
