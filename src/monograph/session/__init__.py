"""A training run as a person lives it: made from settings or a checkpoint, told while it goes on, summed up."""
