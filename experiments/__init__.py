"""experiments: designed comparisons of arms, each a sequence of launches; `restart-impact` is the first.

A study is data (`studies/*.yaml`, or a file of your own): arms as slices and restarts, one primary outcome, contrasts and a
margin, all registered in the journal before the first launch. The runner is a pure function of the journal, so it can be
killed and run again; the report compares arms by paired seeds and says what the data do and do not show.
"""

from chronicle_ml import require_own

require_own("chronicle", "bit_transformer")
