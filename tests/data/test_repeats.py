"""Text without repeats: nothing that is held out is in the training text, in real sources and in planted ones."""

import random

import pytest

from bit_transformer.data.loaders import read_corpus
from chronicle.data.corpora import read_text
from chronicle.data.repeats import SHINGLE_BYTES, repeated_positions, shingle_hashes, without_repeats
from chronicle.data.shards import build_source


def lines(seed: int, count: int) -> bytes:
    """Lines of random words, some with letters of several bytes."""
    draw = random.Random(seed)
    words = ["".join(draw.choice("abcdefghijklmnoüé中") for _ in range(draw.randint(2, 9))) for _ in range(5000)]
    return "".join(" ".join(draw.choice(words) for _ in range(draw.randint(1, 12))) + "\n" for _ in range(count)).encode()


def plain_repeats(text: bytes) -> int:
    """How many 64-byte strings began before, counted in the plainest way."""
    pieces = [text[i:i + SHINGLE_BYTES] for i in range(len(text) - SHINGLE_BYTES + 1)]
    return len(pieces) - len(set(pieces))


def test_repeats_are_found_as_a_plain_count_finds_them():
    text = lines(1, 60) + b"x" * 100
    whole = text + lines(2, 30) + text[500:900] + lines(3, 5)
    assert len(repeated_positions(whole)) == plain_repeats(whole) > 300
    assert len(repeated_positions(b"short")) == 0 == plain_repeats(without_repeats(whole))


def test_the_first_of_equal_passages_stays_and_whole_lines_go():
    one, passage, other = lines(4, 40), lines(5, 20), lines(6, 40)
    kept = without_repeats(one + passage + other + passage)
    assert kept.startswith(one + passage + other) and len(kept) < len(one + passage + other) + 200
    assert set(kept.decode().splitlines()) <= set((one + passage + other).decode().splitlines())
    assert without_repeats(one) == one


@pytest.mark.parametrize("unit", ["中文", "ab"])
def test_a_text_without_lines_is_cut_at_characters(unit):
    draw = random.Random(7)
    text = "".join(draw.choice(unit + "xyz") for _ in range(4000))
    kept = without_repeats((text + text).encode())
    kept.decode()
    assert plain_repeats(kept) == 0 and len(kept) > 0.9 * len(text.encode())


def shared(text, other):
    """The strings of 64 bytes that both have."""
    return set(shingle_hashes(text).tolist()) & set(shingle_hashes(other).tolist())


@pytest.mark.parametrize("name", ["reference", "code"])
def test_no_held_out_string_is_in_the_training_text(name):
    corpus = read_corpus(name)
    assert len(shared(read_text("reference"), read_text("reference"))) > 10_000  # the check can see
    assert len(shared(corpus.held_out, corpus.train)) == 0
    assert len(repeated_positions(corpus.held_out)) == 0


def test_built_shards_hold_no_repeat(tmp_path):
    text = lines(8, 9000)
    manifest = build_source(tmp_path, "twice", text + text, origin="planted")
    assert len(text) * 0.99 < sum(shard.text_bytes for shard in manifest.shards) < len(text) * 1.01
