"""Turns a request into a plan: the edits, the moves and the LRs of the next steps. Pure."""
