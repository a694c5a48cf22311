"""The few parts of torchvision that the scripts of the list call, with random pictures: there is no CPU build offline."""

from torchvision import datasets, models, transforms, utils

__all__ = ["datasets", "models", "transforms", "utils"]
__version__ = "0.28.0"
