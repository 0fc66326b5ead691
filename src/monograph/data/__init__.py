"""From text to batches: documents are found, tokenised once, packed into rows, and visited in a resumable order."""

LARGEST_SHARE = 0.5  # of the bytes that may be held out: beyond it there is less to train on than to measure on
