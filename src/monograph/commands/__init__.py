"""Run each command from its own file, readable from top to bottom. No arithmetic of training lives here."""
