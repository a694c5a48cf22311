"""The model: the transformer over bits, its attention, and the models made from a trained one."""
