"""Histories of runs with a known ancestry: what chronicle says of each is compared with what really happened."""
