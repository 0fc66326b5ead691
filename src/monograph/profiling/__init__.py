"""Watches a run and never steers it: where its time went, what binds it, its memory, the health of the machine."""
