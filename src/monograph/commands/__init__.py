"""One file per command: what it does, read from top to bottom. No arithmetic of training lives here."""
