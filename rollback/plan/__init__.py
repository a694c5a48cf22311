"""A request becomes a plan: the edits, the moves and the LRs that follow. Pure."""
