"""Picture to tensor and back, in the size that is asked for."""

from enum import Enum

import numpy
import torch

__all__ = [
    "CenterCrop", "Compose", "ConvertImageDtype", "InterpolationMode", "Lambda", "Normalize", "PILToTensor",
    "RandomCrop", "RandomHorizontalFlip", "RandomResizedCrop", "Resize", "ToTensor",
]  # fmt: skip


class InterpolationMode(Enum):
    BILINEAR = "bilinear"
    LANCZOS = "lanczos"


class Compose:
    def __init__(self, transforms):
        self.transforms = transforms

    def __call__(self, picture):
        for transform in self.transforms:
            picture = transform(picture)
        return picture


class Resize:
    def __init__(self, size, *_, **__):
        self.size = size if isinstance(size, tuple) else (size, size)

    def __call__(self, picture):
        return picture.resize(self.size) if hasattr(picture, "resize") and not torch.is_tensor(picture) else picture


CenterCrop = RandomCrop = RandomResizedCrop = Resize


class ToTensor:
    def __call__(self, picture):
        if torch.is_tensor(picture):
            return picture
        values = torch.from_numpy(numpy.asarray(picture, dtype="float32") / 255)
        return values.permute(2, 0, 1) if values.ndim == 3 else values[None]


class PILToTensor:
    def __call__(self, picture):
        values = torch.from_numpy(numpy.array(picture))
        return values.permute(2, 0, 1) if values.ndim == 3 else values[None]


class ConvertImageDtype:
    def __init__(self, dtype):
        self.dtype = dtype

    def __call__(self, picture):
        return picture.to(self.dtype) / (1 if picture.is_floating_point() else 255)


class Lambda:
    def __init__(self, function):
        self.function = function

    def __call__(self, picture):
        return self.function(picture)


class Normalize:
    def __init__(self, mean, std, *_, **__):
        self.mean, self.std = torch.tensor(mean).reshape(-1, 1, 1), torch.tensor(std).reshape(-1, 1, 1)

    def __call__(self, picture):
        return (picture - self.mean) / self.std


class RandomHorizontalFlip:
    def __init__(self, *_, **__):
        pass

    def __call__(self, picture):
        flip = torch.rand(1).item() < 0.5
        if not flip:
            return picture
        return picture.flip(-1) if torch.is_tensor(picture) else picture.transpose(0)
