"""A PyTorch function on several workers: a small network learns a sine, as Ray's tutorials train with PyTorch.

python examples/torch_function.py              # two CPU workers
python examples/torch_function.py gpu 4        # four GPUs
"""

import sys

import raygpt


def train(config):
    import ray.train
    import ray.train.torch
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(0)
    x = torch.linspace(-3, 3, 512)[:, None]
    points = DataLoader(TensorDataset(x, torch.sin(x)), batch_size=config["batch"], shuffle=True)
    points = ray.train.torch.prepare_data_loader(points)  # each worker a share of every epoch, on its device
    network = torch.nn.Sequential(torch.nn.Linear(1, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    network = ray.train.torch.prepare_model(network)  # on the device; gradients are averaged over the workers
    optimizer = torch.optim.Adam(network.parameters(), lr=config["learning_rate"])

    for epoch in range(1, config["epochs"] + 1):
        if ray.train.get_context().get_world_size() > 1:
            points.sampler.set_epoch(epoch)  # or each epoch would have the order of the first
        for inputs, targets in points:
            loss = torch.nn.functional.mse_loss(network(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if epoch % 10 == 0:
            ray.train.report({"epoch": epoch, "loss": loss.item(), "workers": torch.distributed.get_world_size()})


if __name__ == "__main__":
    accelerator, workers = sys.argv[1:] or ("cpu", "2")
    result = raygpt.run(
        train,
        {"batch": 32, "learning_rate": 0.01, "epochs": 40},
        engine="torch",
        cluster={"accelerator": accelerator, "workers": workers},
    )
    if result.error:
        raise result.error
    print("loss {loss:.4f} after {epoch} epochs on {workers} workers".format(**result.metrics))
