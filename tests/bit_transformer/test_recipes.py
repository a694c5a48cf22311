"""Recipes are whole and checked; settings change one field each, all at once."""

import pytest

from bit_transformer.errors import BadRecipe
from bit_transformer.recipes import find_recipe, with_settings


def test_settings_reach_nested_fields_by_path_or_by_name() -> None:
    """A dotted path, a name that occurs once, and types as the field declares them."""
    recipe = with_settings(find_recipe("demo"), ["optimizer.lr=1", "d_model=32", "raise_step=none", "data.seed=5", "seed=7"])
    assert (recipe.optimizer.lr, recipe.model.d_model, recipe.schedule.raise_step) == (1.0, 32, None)
    assert (recipe.data.seed, recipe.seed) == (5, 7)


def test_settings_are_applied_together() -> None:
    """Fields that only fit together may come in any order."""
    assert with_settings(find_recipe("demo"), ["total_steps=40", "decay_steps=5"]).schedule.total_steps == 40


@pytest.mark.parametrize(("setting", "sentence"), [
    ("lr", "has no value, expected key=value"),
    ("lrr=1", "`lrr` is unknown"), ("lr=fast", "lr is 'fast', expected a number above 0"),
    ("model=3", "`model` is unknown"), ("batch_size=2.5", "batch_size is 2.5, expected a whole number, 1 or more"),
    ("window_bytes=25", "225 symbols"),
    ("mixed_precision=fp8", "expected no or bf16"), ("eval_every=0", "eval_every is 0")])
def test_wrong_setting_is_one_sentence(setting: str, sentence: str) -> None:
    """Found, where, expected."""
    with pytest.raises(BadRecipe, match=sentence):
        with_settings(find_recipe("demo"), [setting])


def test_unknown_recipe_lists_the_known() -> None:
    """Nothing is guessed from a prefix."""
    with pytest.raises(BadRecipe, match=r"unknown recipe `dem`, expected one of .*demo"):
        find_recipe("dem")


def test_indivisible_batch_is_refused_before_training() -> None:
    """Batch 16 among 3 ranks, or 2 ranks with 16 accumulation steps."""
    recipe = find_recipe("demo")
    with pytest.raises(BadRecipe, match="16 does not divide among 3 ranks × 1 accumulation steps"):
        recipe.require_divisible(3)
    with pytest.raises(BadRecipe, match="2 ranks × 16 accumulation steps"):
        with_settings(recipe, ["accumulation_steps=16"]).require_divisible(2)


@pytest.mark.parametrize(("setting", "sentence"), [
    ("window_bytes=0", "window_bytes is 0, expected a whole number, 1 or more"),
    ("batch_size=-8", "batch_size is -8, expected a whole number, 1 or more"),
    ("num_workers=-1", "num_workers is -1, expected a whole number, 0 or more"),
    ("compress_end=2.0", "compress_end is 2.0, expected a number from 0 to 1"),
    ("optimizer.lr=-1.0", "lr is -1.0, expected a number above 0"),
    ("optimizer.lr=1e999", "lr is inf, expected a number above 0"),
    ("optimizer.lr=0", "lr is 0, expected a number above 0"),
    ("max_grad_norm=0.0", "max_grad_norm is 0.0, expected a number above 0"),
    ("beta1=1.5", "beta1 is 1.5, expected a number from 0 to below 1"),
    ("weight_decay=-0.1", "weight_decay is -0.1, expected a number, 0 or more"),
    ("num_layers=0", "num_layers is 0, expected a whole number, 1 or more"),
    ("num_heads=0", "num_heads is 0, expected a whole number, 1 or more"),
    ("chunk=-4", "chunk is -4, expected a whole number, 0 or more"),
    ("overlap=-1", "overlap is -1, expected a whole number, 0 or more"),
    ("warmup_steps=-3", "warmup_steps is -3, expected a whole number, 0 or more"),
    ("qat_from_step=-1", "qat_from_step is -1, expected a whole number, 0 or more or none"),
    ("beta1=1.0", "beta1 is 1.0, expected a number from 0 to below 1"),
    ("log_every=0", "log_every is 0, expected a whole number, 1 or more"),
    ("ponder_weight=-1.0", "ponder_weight is -1.0, expected a number, 0 or more"),
    ("data.sources={}", "sources is empty, expected one source or more"),
    ("data.sources={'code': 'x'}", "sources is {'code': 'x'}, expected names, each with a whole number, 1 or more"),
    ("data.sources={'code': True}", "sources is {'code': True}, expected names, each with a whole number, 1 or more"),
])
def test_number_out_of_bounds_is_one_sentence_before_anything_is_opened(setting: str, sentence: str) -> None:
    """Every number has its bounds, and the sentence has the field, the value and what was expected."""
    with pytest.raises(BadRecipe) as raised:
        with_settings(find_recipe("demo"), [setting])
    assert str(raised.value).startswith(sentence)
