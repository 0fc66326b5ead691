"""One operation or family of operations per file, with a reference next to each fast path."""
