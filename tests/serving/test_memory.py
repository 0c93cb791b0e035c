"""How many slots a model gets: by its device's free memory."""

import pytest

from raygpt.errors import RaygptError
from raygpt.models import describe
from raygpt.recipes import load_recipe
from raygpt.serving.memory import count_slots, slot_bytes

EACH = 100 * 10**6


def test_a_slot_of_gpt2_has_its_keys_and_values_in_the_precision_of_the_arithmetic():
    description = describe(load_recipe("gpt2-124m").model, 50257)
    rows = 8 * 4 * 50257
    assert slot_bytes(description, "bf16") - rows == 2 * 12 * 12 * 1024 * 64 * 2
    assert slot_bytes(description, "fp32") - rows == 2 * 12 * 12 * 1024 * 64 * 4


@pytest.mark.parametrize(
    ("free", "kind", "count"), [(10**9, "cpu", 5), (10**10, "cpu", 8), (10**9, "gpu", 5), (10**11, "gpu", 32)]
)
def test_by_default_half_of_the_free_memory_decides_up_to_a_number(free, kind, count):
    assert count_slots(None, EACH, free, kind) == count


def test_slots_that_are_asked_for_are_given_or_refused_with_the_number_that_fits():
    assert count_slots(5, EACH, 10**9, "gpu") == 5
    with pytest.raises(RaygptError, match=r"6 slots need 0.60 GB .* 0.50 GB of the GPU's .* write --slots 5 or less"):
        count_slots(6, EACH, 10**9, "gpu")
    with pytest.raises(RaygptError, match=r"1 slots? need.* free some"):
        count_slots(None, EACH, 10**8, "cpu")
