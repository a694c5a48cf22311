"""Step prints that two launches left, compared. No torch."""
