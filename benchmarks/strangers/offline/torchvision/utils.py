"""`make_grid`, of which only the shape matters here."""

import torch

__all__ = ["make_grid"]


def make_grid(pictures, *_, **__):
    return torch.as_tensor(pictures)[0]
