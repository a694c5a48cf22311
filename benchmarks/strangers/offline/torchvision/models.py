"""Two layers under the name of every architecture."""

import torch

__all__ = ["resnet18"]


def resnet18(**_):
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(784, 1000)
    )


def __getattr__(name):
    if name.startswith("_"):
        raise AttributeError(name)
    return resnet18
