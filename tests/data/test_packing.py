"""Rows of a fixed length: the plan's documents one behind the other, whatever the ranks, and which documents a row holds."""

import json
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from chronicle.data import PackedDataset, PlanChanged, PlanDataset, count_tokens
from chronicle.data.plan_dataset import BLOCK_SAMPLES
from chronicle.data.shard_index import index_source
from chronicle.errors import DataError
from tests.data.elastic_data import write_foreign_tars

LENGTH = 700


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory):
    """Two indexed sources of foreign tars, 80 samples each of 20 to 900 bytes, and the counts of their tokens."""
    place = tmp_path_factory.mktemp("packing")
    write_foreign_tars(place, shards=2, samples=40)
    indexes = [index_source(name, place / name) for name in ("web", "code")]
    count_tokens(PlanDataset(indexes, decode=tokens), place / "tokens.npz")
    return indexes, place / "tokens.npz"


def tokens(sample):
    """A token a byte, and 256 behind the document."""
    return [*sample["txt"], 256]


def packed(place, **options):
    indexes, counts = place
    weights = dict(zip(indexes, (3, 1), strict=True))
    return PackedDataset(weights, **{"seed": 4, "decode": tokens, "length": LENGTH, "tokens": counts, **options})


def sequence(place, documents, data=None):
    """All tokens of the plan's documents, one behind the other."""
    plan = PlanDataset(dict(zip(place[0], (3, 1), strict=True)), seed=4, decode=tokens)
    plan.segments = plan.segments if data is None else data.segments
    return np.concatenate([plan[number] for number in range(documents)])


def read(place, batch_size, world_size, steps, state=None, **options):
    """Train `steps` steps on ranks that are played one after the other; the rows in the order of the global batches."""
    found = [[] for _ in range(steps)]
    loaders = [packed(place).loader(batch_size, rank=rank, world_size=world_size, **options) for rank in range(world_size)]
    for loader in loaders:
        if state is not None:
            loader.load_state_dict(state)
        passes = chain.from_iterable(iter(lambda loader=loader: loader, None))  # one epoch after the other
        for step, batch in zip(range(steps), passes, strict=False):
            found[step] += list(batch["tokens"].numpy())
    return [row for rows in found for row in rows], json.loads(json.dumps(loaders[0].state_dict()))


def test_rows_are_the_documents_one_behind_the_other_on_any_ranks_and_across_epochs(place):
    """160 documents an epoch; 2,200 of them are read, over three blocks of 1,024."""
    whole = sequence(place, 2200)
    num_rows = len(whole) // LENGTH
    data = packed(place)
    assert all((data[row]["tokens"] == whole[row * LENGTH:(row + 1) * LENGTH]).all() for row in range(num_rows))
    one, state = read(place, 4, 2, 50)
    two, state = read(place, 6, 1, 60, state, num_workers=2)
    three, _ = read(place, 1, 4, 10, state)
    rows = [*one, *two, *three]
    assert len(rows) == 800 and (np.concatenate(rows) == whole[:800 * LENGTH]).all()
    again = packed(place)
    assert (again[num_rows - 1]["tokens"] == data[num_rows - 1]["tokens"]).all()
    assert len(data) == pytest.approx(160 * 460 / LENGTH, rel=0.2)


def test_the_plan_says_which_documents_are_in_a_row(place):
    data = packed(place)
    plan = PlanDataset(dict(zip(place[0], (3, 1), strict=True)), seed=4)
    for row in (0, 1, 17, 700):
        pieces, found = data.records(row), data[row]
        assert sum(piece.end - piece.first for piece in pieces) == LENGTH
        content = [tokens(plan[piece.number])[piece.first:piece.end] for piece in pieces]
        assert np.concatenate(content).tolist() == found["tokens"].tolist()
        assert [(piece.source, piece.index) for piece in pieces] == [
            (plan.plan.sources[source].name, index) for source, index in (plan.ids(piece.number, 1)[0] for piece in pieces)]
        assert np.bincount(found["document"]).tolist() == [piece.end - piece.first for piece in pieces]
    ends = [data.records(row)[-1] for row in range(60)]
    begins = [data.records(row)[0] for row in range(1, 61)]
    cut = [(end, begin) for end, begin in zip(ends, begins, strict=True) if end.number == begin.number]
    assert cut and all(end.end == begin.first for end, begin in cut)  # a document goes on in the next row


def test_a_resume_adds_up_a_block_and_not_all_before_it(place, monkeypatch):
    _, state = read(place, 8, 2, 100)
    loader = packed(place).loader(4, rank=0, world_size=1)
    loader.load_state_dict(state)
    asked = []
    original = PackedDataset._ends_of
    monkeypatch.setattr(PackedDataset, "_ends_of", lambda self, block: asked.append(block) or original(self, block))
    row = next(iter(loader))
    assert loader.position == 1604 and min(asked) == state["mark"][1] >= 2
    assert (row["tokens"][0].numpy() == packed(place)[1600]["tokens"]).all()


def test_a_reshuffle_keeps_the_rows_before_it_and_loses_and_repeats_no_document(place):
    data = packed(place)
    before = [data[row]["tokens"] for row in range(700)]
    first = data.reshuffled(300)
    whole = sequence(place, 2 * BLOCK_SAMPLES, data)
    assert 300 <= first < 700 and [bool((data[row]["tokens"] == before[row]).all()) for row in range(700)] == [
        row < first for row in range(700)]
    assert (np.concatenate([data[row]["tokens"] for row in range(first, 900)]) == whole[first * LENGTH:900 * LENGTH]).all()


@pytest.mark.parametrize(("options", "words"), [
    ({"length": 512}, "packed was {'length': 700"), ({"seed": 5}, "seed was 4, is 5"),
], ids=["length", "seed"])
def test_another_plan_than_the_saved_one_is_refused(place, options, words):
    _, state = read(place, 4, 1, 3)
    with pytest.raises(PlanChanged, match=words):
        packed(place, **options).loader(4, rank=0, world_size=1).load_state_dict(state)
    unpacked = PlanDataset(dict(zip(place[0], (3, 1), strict=True)), seed=4).loader(4, rank=0, world_size=1)
    with pytest.raises(PlanChanged, match="packed was"):
        unpacked.load_state_dict(state)


def test_another_tokenizer_than_the_counted_one_stops(place):
    data = packed(place, decode=lambda sample: sample["txt"])
    with pytest.raises(DataError, match=r"has \d+ tokens, \d+ were counted"):
        data[0]


def test_counts_by_processes_that_skip_what_cannot_be_decoded(place, tmp_path, capfd):
    def picky(sample):
        if sample["txt"][0] % 16 == 3:
            raise ValueError("not a text")
        return tokens(sample)

    indexes, _ = place
    data = PlanDataset(indexes, decode=picky, on_error="skip")
    count_tokens(data, tmp_path / "one.npz")
    count_tokens(data, tmp_path / "two.npz", processes=2)
    one, two = ({name: found.tolist() for name, found in np.load(tmp_path / f"{name}.npz").items()} for name in ("one", "two"))
    empty = sum(counts.count(0) for counts in one.values())
    assert one == two and empty and capfd.readouterr().err.count("left out: ValueError: not a text") == 2 * empty
    rows = PackedDataset(indexes, decode=picky, length=LENGTH, tokens=tmp_path / "one.npz")
    assert all(len(rows[row]["tokens"]) == LENGTH for row in range(80))
    with pytest.raises(ValueError, match="not a text"):
        count_tokens(PlanDataset(indexes, decode=picky), tmp_path / "three.npz")


def test_missing_damaged_and_foreign_counts_are_one_sentence(place, tmp_path):
    indexes, counts = place
    with pytest.raises(DataError, match="does not exist"):
        packed(place, tokens=tmp_path / "none.npz")
    (tmp_path / "bad.npz").write_bytes(Path(counts).read_bytes()[:-40])
    with pytest.raises(DataError, match="cannot be read"):
        packed(place, tokens=tmp_path / "bad.npz")
    count_tokens(PlanDataset(indexes[:1], decode=tokens), tmp_path / "web.npz")
    with pytest.raises(DataError, match="has no counts of source `code`"):
        packed(place, tokens=tmp_path / "web.npz")
    count_tokens(PlanDataset(indexes, decode=tokens), tmp_path / "web.npz")
    assert packed(place, tokens=tmp_path / "web.npz").records(3) == packed(place).records(3)
    count_tokens(PlanDataset(indexes, decode=lambda sample: []), tmp_path / "empty.npz")
    with pytest.raises(DataError, match="no document has a token"):
        packed(place, tokens=tmp_path / "empty.npz")
