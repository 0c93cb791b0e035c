"""A JAX function on several workers: fit y = 2x + 1, each worker with points of its own.

python examples/line.py              # two CPU workers
python examples/line.py gpu 4        # four GPUs
"""

import sys

import raygpt


def fit_line(config):
    import jax
    import jax.numpy as jnp
    import optax
    import ray.train
    from jax.experimental import multihost_utils
    from jax.sharding import PartitionSpec as P

    # Every process draws the points of its own rank; together they are one array over all devices.
    rank = jax.process_index()
    x = jax.random.uniform(jax.random.key(rank), (config["points"],))
    y = 2 * x + 1 + 0.1 * jax.random.normal(jax.random.key(100 + rank), x.shape)
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    jax.set_mesh(mesh)
    x, y = multihost_utils.host_local_array_to_global_array((x, y), mesh, P("data"))

    def loss(line, x, y):
        return jnp.mean((line["slope"] * x + line["offset"] - y) ** 2)

    optimizer = optax.adam(config["learning_rate"])
    line = {"slope": jnp.zeros(()), "offset": jnp.zeros(())}

    @jax.jit
    def step(line, state, x, y):
        value, gradients = jax.value_and_grad(loss)(line, x, y)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(line, updates), state, value

    state = optimizer.init(line)
    for epoch in range(config["epochs"]):
        line, state, value = step(line, state, x, y)
        if (epoch + 1) % 100 == 0:
            ray.train.report({"epoch": epoch + 1, "loss": float(value), **{k: float(v) for k, v in line.items()}})


if __name__ == "__main__":
    accelerator, workers = sys.argv[1:] or ("cpu", "2")
    result = raygpt.run(
        fit_line,
        {"points": 1000, "learning_rate": 0.01, "epochs": 1000},
        cluster={"accelerator": accelerator, "workers": workers},
    )
    if result.error:
        raise result.error
    print("y = {slope:.2f} x + {offset:.2f}, loss {loss:.4f} after {epoch} epochs".format(**result.metrics))
