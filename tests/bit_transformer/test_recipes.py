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
