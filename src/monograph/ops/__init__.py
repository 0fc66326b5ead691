"""One operation per file, each with its reference beside its fast path where there are two."""
