"""The one place that opens files: what a person gave is read with suspicion, what is written is on the disk."""
