"""bit_transformer: a transformer over the bits of text, and the trainer that chronicle is tested with.

Text becomes UTF-8 bytes, every byte nine bits (eight and parity), and the model predicts the next
bit. Independent implementation from a behaviour specification. torch lives here; `chronicle` and `rollback` never
import this package. `python -m bit_transformer.train --recipe demo` trains.
"""

from chronicle_ml import require_own

require_own("chronicle")
