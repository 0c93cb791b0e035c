"""Dropout by keys: its share, that no two masks have to do with each other, and what a mask depends on."""

import itertools

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the extra torch")

from raygpt.engines.torch.dropout import dropout, dropout_keys  # noqa: E402
from raygpt.models.random_numbers import mix  # noqa: E402


def keys(rows, sites=1, seed=0, step=0):
    return dropout_keys(seed, step, torch.tensor(rows, dtype=torch.int32), sites)


def masks(rate=0.5, rows=range(4), shape=(50, 40), **key):
    """1 where an element of a row is kept: [rows, time · width]."""
    kept = dropout(torch.ones(len(rows), *shape), keys(list(rows), **key)[0], rate) != 0
    return kept.numpy().reshape(len(rows), -1).astype(float)


def lowbias32(x):
    """The published function, in Python's whole numbers."""
    x ^= x >> 16
    x = x * 0x7FEB352D % 2**32
    x ^= x >> 15
    x = x * 0x846CA68B % 2**32
    return x ^ x >> 16


def test_bits_are_those_of_the_published_hash():
    numbers = np.random.default_rng(0).integers(0, 2**32, 1000)
    ours = mix(torch.from_numpy(numbers.astype(np.uint32).view(np.int32))).numpy().view(np.uint32)
    assert ours.tolist() == [lowbias32(int(number)) for number in numbers]


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_it_zeroes_its_share_and_scales_the_rest(rate):
    dropped = dropout(torch.ones(64, 50, 40), keys(list(range(64)))[0], rate)
    assert set(dropped.unique().tolist()) == {0.0, float(torch.tensor(1.0) / (1 - rate))}
    deviation = (rate * (1 - rate) / dropped.numel()) ** 0.5
    assert float((dropped == 0).float().mean()) == pytest.approx(rate, abs=4 * deviation)


def test_every_row_position_and_channel_drops_its_share():
    kept = masks(0.1, range(200), (20, 30)).reshape(200, 20, 30)
    for axes in [(1, 2), (0, 2), (0, 1)]:
        shares = 1 - kept.mean(axes)
        deviation = (0.09 * shares.size / kept.size) ** 0.5
        assert np.abs(shares - 0.1).max() < 5 * deviation
        assert shares.std() == pytest.approx(deviation, rel=0.5)  # neither clumped nor regular


def test_masks_of_other_rows_sites_steps_and_seeds_have_nothing_to_do_with_each_other():
    size = 50 * 40
    drawn = [masks(rows=range(3), seed=seed, step=step) for seed, step in itertools.product([0, 1], [0, 1, 2])]
    sites = dropout_keys(0, 7, torch.arange(3, dtype=torch.int32), 4)
    drawn += [(dropout(torch.ones(3, 50, 40), site, 0.5) != 0).numpy().reshape(3, -1).astype(float) for site in sites]
    all_of_them = np.concatenate(drawn)  # 30 masks
    correlations = np.corrcoef(all_of_them)[np.triu_indices(len(all_of_them), 1)]
    assert np.abs(correlations).max() < 5 / size**0.5
    assert correlations.std() == pytest.approx(size**-0.5, rel=0.2)


def test_neighbours_in_a_mask_have_nothing_to_do_with_each_other():
    kept = masks(rows=range(100))
    for distance in (1, 2, 39, 40, 41, 1024):
        left, right = kept[:, :-distance].ravel(), kept[:, distance:].ravel()
        assert abs(np.corrcoef(left, right)[0, 1]) < 5 / left.size**0.5


def test_a_mask_depends_on_seed_step_row_site_and_position_alone():
    x = torch.ones(4, 8, 16)
    together = dropout(x, keys([3, 4, 5, 6], sites=3)[2], 0.5)
    torch.testing.assert_close(dropout(x[:2], keys([5, 9], sites=9)[2], 0.5)[0], together[2], rtol=0, atol=0)
    torch.testing.assert_close(dropout(x[:1] * 8, keys([4], sites=3)[2], 0.5)[0], together[1] * 8, rtol=0, atol=0)


def test_keys_are_the_hash_of_one_number_after_the_other():
    """For ever: a run that a later version resumes drops what it would have dropped."""
    ours = keys([0, 9], sites=3, seed=2**32 - 1, step=5).numpy().view(np.uint32)  # [sites, 2, rows]
    for site, (place, row) in itertools.product(range(3), enumerate([0, 9])):
        first, second = 0x243F6A88, 0x13198A2E
        for number in (2**32 - 1, 5, row, site):
            first = lowbias32(first ^ number)
            second = lowbias32((second + first) % 2**32)
        assert ours[site, :, place].tolist() == [first, second]


def test_without_a_rate_or_keys_nothing_is_dropped():
    x = torch.ones(2, 3, 4)
    assert dropout(x, keys([0, 1])[0], 0.0) is x
    assert dropout(x, None, 0.5) is x
