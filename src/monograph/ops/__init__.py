"""One operation per file, with a reference next to each fast path."""
