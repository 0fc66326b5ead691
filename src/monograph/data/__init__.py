"""Turn text into batches: find documents, tokenise them once, pack them into rows, and visit these
in a fixed order.
"""

# Of the bytes that may be held out: a larger one leaves less to train on than to measure on.
LARGEST_SHARE = 0.5
LIGHTEST, HEAVIEST = 1e-3, 1e3  # bounds of how often an epoch sees a source
