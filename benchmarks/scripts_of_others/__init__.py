"""Does the guard leave healthy runs of other people's scripts alone? Three kill and resume cycles for each."""
