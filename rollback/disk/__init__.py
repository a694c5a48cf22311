"""Files written durably and read without trust: the primitives that everything else writes and reads with."""
