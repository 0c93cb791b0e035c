"""Models on Ray Serve: a run of either engine, replicas that die, checkpoints that come while it is served."""

import gc
import json
import shutil
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from local_server import serving

from raygpt.corpus.tokenizers import Bytes
from raygpt.errors import RaygptError
from raygpt.interop.importing import import_run
from raygpt.interop.tokenizer_json import to_json

pytest.importorskip("ray.serve", reason="needs the extra serve")
from raygpt.serving.deployment import Replicas, deployed
from raygpt.serving.memory import MOST
from raygpt.serving.model import Options

pytestmark = pytest.mark.usefixtures("ray_cluster")


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """A folder with a random model, as transformers writes it."""
    import torch
    import transformers

    torch.manual_seed(3)
    folder = tmp_path_factory.mktemp("theirs")
    config = transformers.GPT2Config(
        vocab_size=257, n_positions=64, n_embd=32, n_layer=2, n_head=4, initializer_range=0.3,
        bos_token_id=256, eos_token_id=256,
    )  # fmt: skip
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps(to_json(Bytes())))
    return str(folder)


@pytest.fixture(scope="module")
def runs(theirs, tmp_path_factory):
    """The same model as a run of each engine."""
    home = tmp_path_factory.mktemp("ours")
    return {engine: import_run(theirs, str(home / engine), engine).folder for engine in ("jax", "torch")}


def completion(address, **body):
    got = httpx.post(address + "/v1/completions", json={"max_tokens": 20, "seed": 1, **body}, timeout=120)
    return got.status_code, got.json()


def test_runs_of_both_engines_are_served_by_name_and_a_replica_that_dies_is_replaced(runs):
    import ray

    models = {engine: Options(folder, slots=2, waiting=1) for engine, folder in runs.items()}
    with deployed(models, Replicas()) as backends, serving(backends) as address:
        listed = httpx.get(address + "/v1/models", timeout=60).json()["data"]
        assert [(model["id"], model["engine"].split()[0], model["step"]) for model in listed] == [
            ("jax", "jax", 0),
            ("torch", "torch", 0),
        ]
        texts = [completion(address, model=name, prompt="the", temperature=0.8)[1] for name in models]
        assert texts[0]["choices"][0]["text"] == texts[1]["choices"][0]["text"], "the engines draw alike"
        assert completion(address, model="jax", prompt="x", n=4)[0] == 400, "it could never be served"
        with ThreadPoolExecutor(4) as pool:
            many = pool.map(lambda _: completion(address, model="jax", prompt="x", n=3), range(4))
            assert 429 in [status for status, _ in many]
        with httpx.stream(
            "POST",
            address + "/v1/completions",
            json={"prompt": "the", "temperature": 0.8, "max_tokens": 20, "seed": 1, "stream": True},
            timeout=120,
        ) as answer:
            events = [line for line in answer.iter_lines() if line.startswith("data: {")]
        streamed = "".join(json.loads(line[6:])["choices"][0]["text"] for line in events)
        assert streamed == texts[0]["choices"][0]["text"]
        _kill_replica(ray, "jax")
        deadline = time.monotonic() + 180
        status, body = completion(address, model="jax", prompt="the", temperature=0.8)
        while status != 200 and time.monotonic() < deadline:
            assert status in (429, 500, 503), body
            status, body = completion(address, model="jax", prompt="the", temperature=0.8)
        assert body["choices"][0]["text"] == texts[0]["choices"][0]["text"]


def test_replicas_without_room_are_refused_instead_of_awaited():
    models = {name: Options("unused") for name in ("one", "two")}
    refused = pytest.raises(RaygptError, match=r"2 × 1 CPU, 1 GPU do not fit: .* write --gpus 0 to use CPUs")
    with refused, deployed(models, Replicas(gpus=1)):
        raise AssertionError("deployed")


def _kill_replica(ray, name):
    from ray import serve

    app = next(app for app in serve.status().applications if app.endswith(f"-{name}"))
    found = [
        a for a in ray.util.list_named_actors(all_namespaces=True) if a["name"].startswith(f"SERVE_REPLICA::{app}")
    ]
    assert found
    ray.kill(ray.get_actor(found[0]["name"], namespace=found[0]["namespace"]), no_restart=True)


def test_a_run_that_is_training_is_reloaded_at_each_checkpoint(trained_run, tmp_path, monkeypatch):
    from raygpt.serving import model as module
    from raygpt.serving.model import RunModel

    errors, read, said = [FileNotFoundError("pruned")] * 2, module.read, []

    def read_or_fail(*arguments):
        if errors:
            raise errors.pop()
        return read(*arguments)

    monkeypatch.setattr(module, "read", read_or_fail)
    monkeypatch.setattr(module.log, "warning", lambda *words: said.append(words))
    run, growing = trained_run("jax"), tmp_path / "growing"
    shutil.copytree(run, growing, ignore=shutil.ignore_patterns("step-00000020"))
    model = RunModel(Options(str(growing), slots=2, follow=True, poll_s=0.05))
    try:
        with serving({"growing": model}) as address:
            _, early = completion(address, prompt="the c", max_tokens=10)
            assert early["choices"][0]["step"] == 10
            first = weakref.ref(model._batch.served.state.top["tokens"])
            shutil.copytree(run / "checkpoints" / "step-00000020", growing / "copying")
            (growing / "copying").rename(growing / "checkpoints" / "step-00000020")
            deadline = time.monotonic() + 60
            while (late := completion(address, prompt="the c", max_tokens=10)[1])["choices"][0]["step"] == 10:
                assert time.monotonic() < deadline
            assert late["choices"][0]["step"] == 20
            assert [words[-1] for words in said] == ["pruned"]
            gc.collect()
            assert first() is None, "no text is written by it any more"
            losses = httpx.get(address + "/losses", timeout=60).json()
            assert losses["steps"] == 20
            assert losses["loss"][-1][0] == 20
            assert losses["loss"][-1][1] < losses["loss"][0][1]
    finally:
        model.close()


@pytest.mark.extended
def test_a_run_on_s3_is_served_as_one_on_a_disk(theirs, runs, s3):
    from raygpt.serving.cli_options import models_of
    from raygpt.serving.model import RunModel

    import_run(theirs, f"{s3}/served", "jax")
    texts = []
    for folder in (runs["jax"], f"{s3}/served"):
        (options,) = models_of([folder], follow=False).values()
        model = RunModel(options)
        try:
            with serving({"it": model}) as address:
                texts.append(completion(address, prompt="the", temperature=0.8)[1]["choices"][0]["text"])
                (listed,) = httpx.get(address + "/v1/models", timeout=60).json()["data"]
        finally:
            model.close()
    assert texts[0] == texts[1]
    assert listed["slots"] == MOST["cpu"], "by default"
