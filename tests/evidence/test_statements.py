"""Sentences into statements: what a written number stands for, and what is no statement of fact."""

import math

import pytest

from chronicle.audit.statements import Topic, parse_claim, parse_number


@pytest.mark.parametrize(
    "digits, scale, inside, outside",
    [
        ("1.21", "B", [1_208_606_722, 1_205_000_000, 1_214_999_999], [1_204_000_000, 1_216_000_000, 771_176_450]),
        ("1", "B", [1_000_000_000, 960_000_000], [771_176_450, 1_208_606_722]),
        ("1.0", "B", [1_049_000_000], [1_051_000_000, 771_176_450]),
        ("680", "M", [679_962_626], [169_990_657, 681_000_000]),
        ("771,176,450", None, [771_176_450], [771_176_449, 771_176_451]),
        ("4", None, [4], [3, 5, 1]),
    ],
)
def test_tolerance_is_what_the_writing_implies(digits, scale, inside, outside):
    """1.21B is ±0.005B; 1B is not 771M: half a unit of the last digit, but never more than 5 %."""
    low, high = parse_number(digits, scale)
    assert all(low <= value <= high for value in inside)
    assert not any(low <= value <= high for value in outside)


def test_bounds_and_approximations():
    assert parse_number("1", "B", "over")[1] == math.inf
    assert parse_number("100", None, "~") == (90, 110)


def kinds(sentence):
    return {(one.kind, one.text) for one in parse_claim(sentence)}


def test_the_sentence_of_the_issue_gives_four_statements():
    assert kinds("trained 1.21B on 4 GPUs on WikiText-103") == {
        (Topic.PARAMETERS, "1.21B"),
        (Topic.DEVICES, "4 GPUs"),
        (Topic.DATASET, "on WikiText-103"),
        (Topic.TRAINED, "trained"),
    }


@pytest.mark.parametrize(
    "sentence, kind, low, high",
    [
        ("Model created with 169,990,657 parameters", Topic.PARAMETERS, 169_990_657, 169_990_657),
        ("Hardware: 4x NVIDIA L4 GPUs", Topic.DEVICES, 4, 4),
        ("on 8 x A100", Topic.DEVICES, 8, 8),
        ("3,000 optimizer steps", Topic.STEPS, 3000, 3000),
        ("1.5B tokens", Topic.TOKENS, 1.45e9, 1.55e9),
        ("12 GB of text", Topic.BYTES, 11.5e9, 12.5e9),
        ("loss down to 0.81", Topic.LOSS, 0.805, 0.815),
        ("on 2 nodes", Topic.HOSTS, 2, 2),
        ("a 1B+ model", Topic.PARAMETERS, 1e9, math.inf),
    ],
)
def test_numbers_are_read_with_what_they_count(sentence, kind, low, high):
    found = [one for one in parse_claim(sentence) if one.kind is kind]
    assert [(round(one.low, 6), one.high if one.high == math.inf else round(one.high, 6)) for one in found] == [(low, high)]


def test_tokens_are_not_parameters_and_gpus_are_no_dataset():
    found = {(Topic.TOKENS, "1.5B tokens"), (Topic.NOT_READ, "GPU 3 it saw")}
    assert kinds("on GPU 3 it saw 1.5B tokens") == found


@pytest.mark.parametrize("sentence", ["Target: 1,208,606,722 parameters", "we will train 1.21B", "planned on 4 GPUs"])
def test_a_target_is_an_intent_and_nothing_else(sentence):
    """Seed 001 took `Target:` lines for proof."""
    assert [one.kind for one in parse_claim(sentence)] == [Topic.INTENT]


@pytest.mark.parametrize(
    "sentence, kind, low, high",
    [
        ("between 700M and 800M parameters", Topic.PARAMETERS, 699.5e6, 800.5e6),
        ("700-800M parameters", Topic.PARAMETERS, 699.5e6, 800.5e6),
        ("under 1B parameters", Topic.PARAMETERS, 0, 1e9),
        ("at most 2 GPUs", Topic.DEVICES, 0, 2),
        ("no more than 2 GPUs", Topic.DEVICES, 0, 2),
        ("on a single GPU", Topic.DEVICES, 1, 1),
        ("on two GPUs", Topic.DEVICES, 2, 2),
        ("on 1,024 H100s", Topic.DEVICES, 1024, 1024),
        ("1e9 parameters", Topic.PARAMETERS, 0.95e9, 1.05e9),
        ("771,176,450", Topic.PARAMETERS, 771_176_450, 771_176_450),
        ("771 million params", Topic.PARAMETERS, 770.5e6, 771.5e6),
        ("~0.8B params", Topic.PARAMETERS, 0.72e9, 0.88e9),
        ("5 short text samples", Topic.SAMPLES, 5, 5),
        ("0.5 GB of data", Topic.BYTES, 0.45e9, 0.55e9),
        ("12 hours", Topic.DURATION, 41040, 45360),
        ("ran step 3000", Topic.STEPS, 3000, 3000),
    ],
)
def test_ranges_bounds_words_and_units(sentence, kind, low, high):
    found = [one for one in parse_claim(sentence) if one.kind is kind]
    assert [(round(one.low, 3), round(one.high, 3)) for one in found] == [(low, high)]


def test_a_scale_down_is_two_numbers_and_corpora_are_named_anywhere():
    assert [one.text for one in parse_claim("680M → 170M")] == ["680M", "170M"]
    assert [one.word for one in parse_claim("on The Pile and C4")] == ["The Pile", "C4"]
    assert [one.word for one in parse_claim("read 540 MB of wikitext-103") if one.kind is Topic.DATASET] == ["wikitext-103"]


@pytest.mark.parametrize("sentence", ["We did not train 1.21B", "no GPU was used", "never ran on 4 GPUs"])
def test_a_denial_is_nothing_that_records_can_show(sentence):
    assert [one.kind for one in parse_claim(sentence)] == [Topic.DENIAL]


@pytest.mark.parametrize("sentence, text", [("loss fell by 50%", "50%"), ("batch size 512", "512"), ("at lr 3e-4", "3e-4")])
def test_a_number_that_nothing_can_answer_does_not_look_checked(sentence, text):
    assert [one.text for one in parse_claim(sentence) if one.kind is not Topic.NOT_READ] == [text]


def test_an_intention_does_not_cover_the_next_clause_and_times_are_no_claims():
    found = parse_claim("planned 1.21B, trained 771M but not on 4 GPUs")
    assert [one.kind for one in found] == [Topic.PARAMETERS, Topic.TRAINED, Topic.INTENT, Topic.DENIAL]
    assert parse_claim("2025-08-24 07:15:57 on ip-26-0-147-135, Xid 64, GPT-2") == ()


def test_a_sentence_without_anything_checkable_gives_nothing():
    assert parse_claim("the loss curve looks lovely") == ()
