"""One order of samples for any script: world size, batch size and workers may change, a restart loses and repeats nothing."""

import json
from pathlib import Path

import pytest

from chronicle.data import PlanChanged, PlanDataset
from chronicle.data.plan_dataset import BLOCK_SAMPLES
from chronicle.data.shard_index import index_source
from chronicle.data.shards import ShardProblem
from chronicle.errors import DataError
from tests.data.elastic_data import drill, write_foreign_tars

LENGTH = 240


@pytest.fixture(scope="module")
def indexes(tmp_path_factory: pytest.TempPathFactory):
    """Two indexed sources of foreign tars, 80 samples each."""
    place = tmp_path_factory.mktemp("shards")
    write_foreign_tars(place, shards=2, samples=40)
    return [index_source(name, place / name) for name in ("web", "code")]


def name_of(sample):
    return json.loads(sample["meta.json"])["id"]


def plain(batch):
    return batch


def dataset(indexes, **options):
    return PlanDataset(dict(zip(indexes, (3, 1), strict=True)), seed=4, **{"decode": name_of, **options})


def whole(indexes):
    data = dataset(indexes)
    return [data[number] for number in range(LENGTH)]


def read(data, batch_size, world_size, steps, state=None, **options):
    """Train `steps` steps on ranks that are played one after the other; the names in the order of the global batches."""
    loaders = [data.loader(batch_size, rank=rank, world_size=world_size, num_samples=LENGTH, collate_fn=plain, **options)
               for rank in range(world_size)]
    found = [[] for _ in range(steps)]
    for loader in loaders:
        if state is not None:
            loader.load_state_dict(state)
        for step, batch in zip(range(steps), loader, strict=False):
            found[step] += batch
    assert len({json.dumps(loader.state_dict()) for loader in loaders}) == 1
    return [name for names in found for name in names], loaders[0].state_dict()


def test_the_order_stays_when_ranks_batch_and_workers_change(indexes):
    straight = whole(indexes)
    one, state = read(dataset(indexes), 4, 2, 5)
    two, state = read(dataset(indexes), 6, 1, 7, state, num_workers=2)
    three, state = read(dataset(indexes), 2, 3, 9, json.loads(json.dumps(state)))
    assert one + two + three == straight[:40 + 42 + 54] and state["position"] == 136


def test_a_state_counts_what_was_handed_out_and_not_what_workers_read_ahead(indexes):
    data = dataset(indexes)
    loader = data.loader(4, rank=0, world_size=1, num_samples=LENGTH, num_workers=2, collate_fn=plain)
    seen = [name for _, batch in zip(range(3), loader, strict=False) for name in batch]
    assert loader.state_dict()["position"] == 12 and len(loader) == LENGTH // 4  # a whole pass, as trainers expect
    assert seen + next(iter(loader)) == [data[number] for number in range(16)]


def test_the_mixture_is_exact_and_epochs_are_what_was_asked(indexes):
    data = PlanDataset(dict(zip(indexes, (3, 1), strict=True)), seed=4)
    ids = data.ids(0, 4 * BLOCK_SAMPLES)
    assert (ids[:, 0] == 1).sum() == BLOCK_SAMPLES
    twice = PlanDataset(indexes, epochs=(2, 1), seed=4)
    assert [(source.name, source.weight) for source in twice.plan.sources] == [("web", 160), ("code", 80)]
    with pytest.raises(DataError, match="3 numbers of epochs for 2 sources"):
        PlanDataset(indexes, epochs=(1, 1, 1))


def test_another_plan_is_refused_by_name(indexes):
    state = dataset(indexes).loader(4, rank=0, world_size=1).state_dict()
    other = PlanDataset(dict(zip(indexes, (1, 1), strict=True)), seed=4).loader(4, rank=0, world_size=1)
    with pytest.raises(PlanChanged, match="source `web` was"):
        other.load_state_dict(state)
    with pytest.raises(DataError, match="version 7"):
        other.load_state_dict({**state, "v": 7})


def test_skips_and_reshuffles_are_of_the_state_and_nothing_repeats(indexes):
    data = PlanDataset(indexes, seed=4)
    loader = data.loader(4, rank=0, world_size=1)
    loader.skip(10)
    assert loader.state_dict()["position"] == 10
    with pytest.raises(DataError, match="skip of -1"):
        loader.skip(-1)
    before = data.ids(0, 5 * BLOCK_SAMPLES).tolist()
    data.reshuffled(BLOCK_SAMPLES + 3)
    after = data.ids(0, 5 * BLOCK_SAMPLES).tolist()
    assert after[:2 * BLOCK_SAMPLES] == before[:2 * BLOCK_SAMPLES] and after != before
    again = PlanDataset(indexes, seed=4)
    again.loader(4, rank=0, world_size=1).load_state_dict(loader.state_dict())
    assert again.ids(0, 5 * BLOCK_SAMPLES).tolist() == after


def test_a_sample_that_cannot_be_decoded_stops_or_is_left_out_and_named(indexes, capfd):
    def decode(sample):
        name = name_of(sample)
        if name.endswith("-7"):
            raise ValueError("broken image")
        return name

    with pytest.raises(ValueError, match="broken image"):
        read(dataset(indexes, decode=decode), 8, 1, 30)
    data = dataset(indexes, decode=decode, on_error="skip")
    names, state = read(data, 8, 1, 30, num_workers=2)
    every = whole(indexes)
    assert names == [name for name in every if not name.endswith("-7")] and state["position"] == LENGTH
    assert capfd.readouterr().err.count("left out: ValueError: broken image") == len(every) - len(names) > 0
    with pytest.raises(DataError, match="on_error is `ignore`"):
        dataset(indexes, on_error="ignore")


def test_changed_bytes_stop_whatever_the_policy(tmp_path):
    write_foreign_tars(tmp_path, shards=1, samples=10)
    data = PlanDataset([index_source("web", tmp_path / "web")], on_error="skip")
    path = tmp_path / "web/part.000.tar"
    content = bytearray(path.read_bytes())
    content[1600] ^= 4
    path.write_bytes(content)
    with pytest.raises(ShardProblem, match="has changed"):
        data.__getitems__(range(10))


def test_options_that_would_break_the_order_are_refused(indexes):
    data = dataset(indexes)
    with pytest.raises(DataError, match="the plan decides shuffle"):
        data.loader(4, shuffle=True)
    with pytest.raises(DataError, match="rank 2 of 2"):
        data.loader(4, rank=2, world_size=2)


def test_loaders_with_workers_read_the_plans_order(indexes):
    """Map-style: a loader that does not shuffle reads sample after sample."""
    torch = pytest.importorskip("torch")
    data = dataset(indexes)
    names = [name for batch in torch.utils.data.DataLoader(data, batch_size=5, collate_fn=plain) for name in batch]
    assert names == [data[number] for number in range(160)] == list(data) and len(data) == 160


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_plain_script_that_is_killed_on_changing_ranks_loses_and_repeats_nothing(tmp_path: Path):
    assert drill(tmp_path, kills=4, steps=60, seed=3) == 0


def test_a_change_of_a_rollback_is_made_once_in_a_lineage(indexes, capsys):
    """The guard asks at every resume; a state from after the change has it already, one from before it has not."""
    loader = dataset(indexes).loader(4, rank=0, world_size=1, collate_fn=plain)
    before = loader.state_dict()
    taken_back = loader.change_when_read("R0", batches=7)
    loader.forget_change(taken_back)
    change = loader.change_when_read("R1", batches=3)
    assert not change.used and next(iter(loader)) == whole(indexes)[12:16] and change.used and not taken_back.used
    after = json.loads(json.dumps(loader.state_dict()))
    for state, first in ((after, 16), (before, 12)):
        again = dataset(indexes).loader(4, rank=0, world_size=1, collate_fn=plain)
        again.change_when_read("R1", batches=3)
        again.load_state_dict(state)
        assert next(iter(again)) == whole(indexes)[first:first + 4] and again.position == first + 4
    assert capsys.readouterr().err.count("12 samples of the plan are left out after sample 0; the next is 12") == 2
