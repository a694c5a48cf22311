"""Counting real torch modules: tied weights once, the formula of the published sizes, ranks of a sharded model."""

import torch

from chronicle.audit import count_parameters, describe_device


def test_tied_weights_count_once():
    embedding = torch.nn.Embedding(100, 8)
    head = torch.nn.Linear(8, 100, bias=False)
    head.weight = embedding.weight
    counts = count_parameters(torch.nn.ModuleDict({"embedding": embedding, "head": head}))
    assert (counts.local, counts.whole, counts.trainable) == (800, 800, 800)


def test_two_parameter_objects_over_one_storage_count_once():
    """What a careless load leaves: tied in memory, but no longer one object, so torch's own iteration sees two."""
    embedding, head = torch.nn.Embedding(100, 8), torch.nn.Linear(8, 100, bias=False)
    head.weight = torch.nn.Parameter(embedding.weight.data)
    assert count_parameters(torch.nn.ModuleDict({"embedding": embedding, "head": head})).whole == 800


def test_two_slices_of_one_flat_storage_are_two_parameters():
    """FSDP keeps views into one flat parameter: same storage, other offsets."""
    flat = torch.zeros(30)
    module = torch.nn.Module()
    module.first, module.second = torch.nn.Parameter(flat[:10]), torch.nn.Parameter(flat[10:])
    assert count_parameters(module).local == 30


def test_meta_device_and_frozen_parameters():
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(10, 10), torch.nn.Linear(10, 10))
    model[0].requires_grad_(False)
    counts = count_parameters(model)
    assert (counts.whole, counts.trainable) == (220, 110)


def test_zero3_size_is_read_from_the_parameter():
    """transformers#22193: `numel()` is 0 on every rank."""
    model = torch.nn.Linear(1, 1, bias=False)
    model.weight = torch.nn.Parameter(torch.zeros(0))
    model.weight.ds_numel = 4096
    assert (count_parameters(model).local, count_parameters(model).whole) == (0, 4096)


def test_cpu_ranks_are_told_apart_by_process():
    assert describe_device(torch.device("cpu"))["id"].count("/") == 1
