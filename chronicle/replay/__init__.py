"""Replay: a recorded step again, compared print by print, and who is to blame where it is another one."""
