"""The scoreboard: what chronicle does today, as rows that can be compared with the rows of another commit.

`make scoreboard` plays every section of `sections.py` in a process of its own and writes one JSON and one page. A section that
could not run is a row that says why. `--against FILE` prints which rows differ from an earlier JSON.
"""
