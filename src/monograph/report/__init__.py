"""Present a run, a sweep, a ladder or a profile to a person: quantities, figures, pages."""
