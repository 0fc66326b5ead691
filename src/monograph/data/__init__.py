"""From text to batches: documents are found, tokenised once, packed into rows, and visited in a resumable order."""
