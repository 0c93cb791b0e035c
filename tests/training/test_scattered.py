"""Training from a scattered store in an object store, through a cache that is smaller than the store."""

from pathlib import Path

import numpy as np
import pytest

import raygpt
from raygpt.corpus import prepare
from raygpt.corpus.scatter import scatter
from raygpt.corpus.store import TokenStore, open_store
from raygpt.testing.chaos import disturb, losses

SETTINGS = {
    "model": {"layers": 1, "heads": 2, "width": 16, "context": 64, "dropout": 0.1},
    "schedule": {"kind": "constant", "warmup_steps": 0},
    "training": {
        "batch_tokens": 96 * 64,
        "steps": 60,
        "log_every": 1,
        "eval_every": 60,
        "checkpoint_every": 10,
        "accumulation": 2,
    },
    "cluster.workers": 2,
}
SHARD_BYTES, CACHE_BYTES = 600_000, 2_000_000


def text_file(folder: Path) -> str:
    rng = np.random.default_rng(0)
    words = [f"{number:x}" for number in rng.integers(0, 4096, 1_300_000)]
    lines = [" ".join(words[start : start + 50]) for start in range(0, len(words), 50)]
    (folder / "text.txt").write_text("\n<|endoftext|>\n".join(lines))
    return str(folder / "text.txt")


def scattered(plain: TokenStore, folder: str) -> None:
    index = scatter(plain, folder, "2" * 16, seed=7, by_content=False, bucket_bytes=SHARD_BYTES)
    assert len(index.train) > index.train.group  # type: ignore[attr-defined]
    index.write(folder)


@pytest.mark.extended
def test_a_killed_run_through_a_small_cache_has_the_losses_of_one_from_a_disk(
    ray_cluster: None, s3: str, tmp_path: Path
) -> None:
    plain = prepare.prepare(text_file(tmp_path), str(tmp_path / "plain"), "bytes", val=0.01)
    near, far = str(tmp_path / "scattered"), f"{s3}/scattered-training"
    for folder in (near, far):
        scattered(plain, folder)
    assert 2 * len(open_store(near).train) > 4 * CACHE_BYTES
    shared = {**SETTINGS, "data.tokenizer": near, "run.storage": str(tmp_path)}
    on_disk = raygpt.train("tiny", **shared, **{"data.source": near, "run.name": "disk"})
    assert on_disk.error is None

    del shared["run.storage"]
    cache = {"data.source": far, "data.cache": CACHE_BYTES / 1e9}
    where = {"cluster.runtime_env": {"env_vars": {"XDG_CACHE_HOME": str(tmp_path / "cache")}}}
    found = disturb("tiny", ["kill@35:1"], home=str(tmp_path), **shared, **cache, **where)
    assert (found.struck, found.restarts, found.is_identical) == (["kill@35:1"], 1, True)
    assert losses(on_disk.path) == losses(f"{tmp_path}/disturbed")
    kept = [path for path in (tmp_path / "cache").rglob("*") if path.is_file() and path.name.lstrip("-").isdigit()]
    assert 0 < sum(path.stat().st_size for path in kept) <= CACHE_BYTES
