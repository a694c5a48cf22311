"""Training data: text as bits, the corpora, and the batches of every step."""
