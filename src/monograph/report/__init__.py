"""What a person is shown of a run, a sweep, a ladder or a profile: quantities, figures, pages."""
