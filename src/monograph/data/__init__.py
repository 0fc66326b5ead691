"""Turn text into batches: find documents, tokenise them once, pack them into rows, and visit the
rows in a fixed order.
"""

# The largest share of the bytes that may be held out. With a larger one, there would be less to
# train on than to measure on.
LARGEST_SHARE = 0.5
# Bounds of a source's weight: how often an epoch sees the source.
LIGHTEST = 1e-3
HEAVIEST = 1e3
