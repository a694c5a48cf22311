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
    ("lr", "has no value, expected key=value"), ("lrr=1", "`lrr` is unknown"), ("lr=fast", "expected float"),
    ("model=3", "names a group of fields"), ("batch_size=2.5", "expected int"), ("window_bytes=25", "225 symbols"),
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
    ("window_bytes=0", "data.window_bytes is 0, expected 1 or more"),
    ("batch_size=-8", "data.batch_size is -8, expected 1 or more"),
    ("num_workers=-1", "data.num_workers is -1, expected 0 or more"),
    ("compress_end=2.0", "data.compress_end is 2.0, expected from 0 to 1"),
    ("optimizer.lr=-1.0", "optimizer.lr is -1.0, expected a number above 0"),
    ("optimizer.lr=1e999", "optimizer.lr is inf, expected a number above 0"),
    ("optimizer.lr=0", "optimizer.lr is 0.0, expected a number above 0"),
    ("max_grad_norm=0.0", "optimizer.max_grad_norm is 0.0, expected a number above 0"),
    ("beta1=1.5", "optimizer.beta1 is 1.5, expected from 0 to below 1"),
    ("weight_decay=-0.1", "optimizer.weight_decay is -0.1, expected 0 or more"),
    ("num_layers=0", "model.num_layers is 0, expected 1 or more"),
    ("num_heads=0", "d_model 64 does not divide into 0 heads of even width"),
    ("chunk=-4", "model.chunk is -4, expected 0 or more"),
    ("overlap=-1", "model.overlap is -1, expected 0 or more"),
    ("warmup_steps=-3", "schedule.warmup_steps is -3, expected 0 or more"),
    ("qat_from_step=-1", "qat_from_step is -1, expected 0 or more"),
    ("ema_decay=1.0", "ema_decay is 1.0, expected from 0 to below 1"),
    ("log_every=0", "log_every is 0, expected 1 or more"),
    ("ponder_weight=-1.0", "ponder_weight is -1.0, expected 0 or more"),
    ("data.sources={}", "data.sources is empty, expected one source or more"),
    ("data.sources={'code': 'x'}", "source `code` has weight 'x', expected a whole number above 0"),
    ("data.sources={'code': True}", "source `code` has weight True, expected a whole number above 0"),
])
def test_number_out_of_bounds_is_one_sentence_before_anything_is_opened(setting: str, sentence: str) -> None:
    """Every number has its bounds, and the sentence has the field, the value and what was expected."""
    with pytest.raises(BadRecipe) as raised:
        with_settings(find_recipe("demo"), [setting])
    assert str(raised.value).startswith(sentence)
