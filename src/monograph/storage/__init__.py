"""All access to files: files that a user gave are not trusted, and written files are made durable."""
