"""A Ray Dataset for a JAX function on several workers: fit y = 2x + 1 to points that Ray Data reads and splits.

python examples/dataset_function.py            # two CPU workers
python examples/dataset_function.py gpu 4      # four GPUs
"""

import sys

import raygpt


def points():
    """A Ray Dataset; any other would do, e.g. ray.data.read_parquet("s3://…")."""
    import numpy as np
    import ray.data

    def make(rows):
        x = rows["id"] * 0.618 % 1  # spread over [0, 1) in every batch
        return {"x": x, "y": 2 * x + 1 + 0.1 * np.random.default_rng(rows["id"][0]).standard_normal(len(x))}

    return ray.data.range(4096).map_batches(make, batch_size=512)


def fit_line(config):
    import jax
    import jax.numpy as jnp
    import optax
    import ray.train
    from jax.experimental import multihost_utils
    from jax.sharding import PartitionSpec as P

    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    jax.set_mesh(mesh)
    optimizer = optax.adam(config["learning_rate"])
    line = {"slope": jnp.zeros(()), "offset": jnp.zeros(())}
    state = optimizer.init(line)

    @jax.jit
    def step(line, state, x, y):
        loss = lambda line: jnp.mean((line["slope"] * x + line["offset"] - y) ** 2)  # noqa: E731
        value, gradients = jax.value_and_grad(loss)(line)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(line, updates), state, value

    shard = ray.train.get_dataset_shard("train")  # this worker's part, as many rows as every other's
    for epoch in range(1, config["epochs"] + 1):
        for batch in shard.iter_batches(batch_size=256, drop_last=True):
            rows = (batch["x"].astype("float32"), batch["y"].astype("float32"))
            x, y = multihost_utils.host_local_array_to_global_array(rows, mesh, P("data"))
            line, state, value = step(line, state, x, y)
        ray.train.report({"epoch": epoch, "loss": float(value), **{k: float(v) for k, v in line.items()}})


if __name__ == "__main__":
    accelerator, workers = sys.argv[1:] or ("cpu", "2")
    result = raygpt.run(
        fit_line,
        {"learning_rate": 0.1, "epochs": 20},
        datasets={"train": points},
        cluster={"accelerator": accelerator, "workers": workers},
    )
    if result.error:
        raise result.error
    print("y = {slope:.2f} x + {offset:.2f}, loss {loss:.4f} after {epoch} epochs".format(**result.metrics))
