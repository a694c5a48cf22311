"""Does the guard leave healthy runs of other people's scripts alone? Thirty scripts, three kill and resume cycles each."""
