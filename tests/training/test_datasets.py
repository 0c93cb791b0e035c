"""Rows that Ray Train's workers get are those that the feed reads, rank by rank."""

import numpy as np
import pytest

from raygpt.corpus.feed import Feed, rows_of_worker
from raygpt.corpus.prepare import prepare
from raygpt.training.ray.datasets import BatchRows, RowsByRank

CONTEXT, ROWS, BATCHES = 16, 5, range(3, 9)


@pytest.fixture(scope="module")
def feed(ray_cluster, tmp_path_factory):
    folder = tmp_path_factory.mktemp("launch")
    (folder / "text.txt").write_text("".join(f"line {n} of a text that is not long\n" for n in range(200)))
    store = prepare(str(folder / "text.txt"), str(folder / "store"), "bytes", val=0.1)
    return Feed([store.train], context=CONTEXT, batch_rows=ROWS, order="shuffled", seed=5)


# a lambda, because Ray sends it by value: its workers cannot import this file
every_row = lambda batch_rows, rank, workers: range(batch_rows)  # noqa: E731


def train_on_workers(feed, workers, rows_of, folder):
    """What each rank got through `ray.train.get_dataset_shard`, batch after batch: {rank: (x, y)}."""
    from ray.train import RunConfig, ScalingConfig
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    def loop(config):
        import ray.train

        rank = ray.train.get_context().get_world_rank()
        rows = list(ray.train.get_dataset_shard("train").iter_batches(batch_size=len(config["rows"][rank])))
        np.savez(f"{config['folder']}/{rank}.npz", x=[r["x"] for r in rows], y=[r["y"] for r in rows])

    rows = BatchRows(feed, BATCHES, rows_of)
    DataParallelTrainer(
        loop,
        train_loop_config={"folder": folder, "rows": [rows_of(ROWS, rank, workers) for rank in range(workers)]},
        scaling_config=ScalingConfig(num_workers=workers, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(storage_path=folder, name="rows"),
        datasets={"train": rows.all()},
        dataset_config=RowsByRank({"train": rows}),
    ).fit()
    return {rank: np.load(f"{folder}/{rank}.npz") for rank in range(workers)}


@pytest.mark.extended  # test_function.py has workers that share the rows
@pytest.mark.parametrize("rows_of", [rows_of_worker, every_row], ids=["shared out", "the same to all"])
def test_each_rank_gets_its_rows_of_each_batch_in_order(feed, tmp_path, rows_of):
    got = train_on_workers(feed, 2, rows_of, str(tmp_path))
    for rank, arrays in got.items():
        expected = np.stack([feed.rows(batch, rows_of(ROWS, rank, 2)) for batch in BATCHES])
        assert arrays["x"].dtype == np.int32
        np.testing.assert_array_equal(arrays["x"], expected[:, :, :-1])
        np.testing.assert_array_equal(arrays["y"], expected[:, :, 1:])
