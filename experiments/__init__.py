"""experiments: designed comparisons of arms, each a sequence of launches; `restart-impact` is the first.

A study is a YAML file (`studies/*.yaml`, or your own): arms as slices and restarts, one primary outcome, contrasts and a
margin, all registered in the journal before the first launch. The runner decides from the journal alone, so it can be killed
and run again. The report compares arms by paired seeds.
"""

from chronicle_ml import require_own

require_own("chronicle", "bit_transformer")
