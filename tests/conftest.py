"""What tests of several modules share: real text, an S3 server on loopback, one Ray cluster for the whole session."""

import contextlib
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# Before anything imports jax: eight devices for meshes. A worker that a test starts appends a count of its own.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("NPROC", "64")  # threads of XLA's pool: see engines/jax/processes.py
os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's 15 gives a worker 3 % of a core that anything else wants

import raygpt
from raygpt import cli

settings.register_profile("raygpt", deadline=None, max_examples=60)  # two busy cores: a slow example is no failure
settings.load_profile("raygpt")
# A shell's background jobs ignore Ctrl-C, those of nohup a closed terminal: so would the programs that tests signal.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# `make test-wheel` runs the tests elsewhere and says where the checkout is
CHECKOUT = Path(os.environ.get("RAYGPT_CHECKOUT") or Path(__file__).parents[1])


def also(*cases: Any) -> list[Any]:
    """Cases of a parameter that only `make test-all` runs: they repeat what another case shows.

    @pytest.mark.parametrize("chunks", [2, *also(1, 3, 6)])
    """
    return [pytest.param(*(case if isinstance(case, tuple) else [case]), marks=pytest.mark.extended) for case in cases]


@pytest.fixture(scope="module")
def compiled_quickly() -> Iterator[None]:
    """XLA's passes take most of a test's time, and change no digit that most tests look at."""
    jax = pytest.importorskip("jax")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For PyTorch: the matrices of most tests are slower on two, and much slower where the cores are busy."""
    torch = pytest.importorskip("torch", reason="needs the extra torch")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real text and evaluation sets, which lie beside the checkout and are no part of it."""
    folder = Path(os.environ.get("RAYGPT_TEST_DATA") or CHECKOUT.resolve().parent / "shared" / "data")
    if not folder.is_dir():
        pytest.skip("needs RAYGPT_TEST_DATA, a folder with enwiki2014/ and tiktoken_cache/")
    return folder


@pytest.fixture(scope="session")
def harness_tasks(shared_data: Path) -> list[dict[str, Any]]:
    """HellaSwag and LAMBADA as lm-evaluation-harness configures them, on our items."""
    choices = ["endings[0]", "endings[1]", "endings[2]", "endings[3]"]
    local = {"dataset_path": "json", "test_split": "test", "num_fewshot": 0}
    data = {"hellaswag": "hellaswag_val.jsonl", "lambada": "lambada_test.jsonl"}
    files = {name: {"data_files": {"test": str(shared_data / "eval" / file)}} for name, file in data.items()}
    return [
        {
            **local,
            "task": "hellaswag-here",
            "dataset_kwargs": files["hellaswag"],
            "output_type": "multiple_choice",
            "doc_to_text": "{{(activity_label + ': ' + ctx).strip()}}",
            "doc_to_target": "{{label}}",
            "doc_to_choice": "{{[" + ", ".join(f"{choice}.strip()" for choice in choices) + "]}}",
            "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
        },
        {
            **local,
            "task": "lambada-here",
            "dataset_kwargs": files["lambada"],
            "output_type": "loglikelihood",
            "doc_to_text": "{{text.split(' ')[:-1]|join(' ')}}",
            "doc_to_target": "{{' '+text.split(' ')[-1]}}",
            "metric_list": [{"metric": "perplexity", "aggregation": "perplexity"}, {"metric": "acc"}],
        },
    ]


@pytest.fixture(scope="session")
def s3() -> Iterator[str]:
    """A bucket, e.g. s3://bucket-1f0c3a7b, on a server of ours; the environment leads every S3 client there."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    endpoint, bucket = f"http://127.0.0.1:{port}", f"bucket-{uuid.uuid4().hex[:8]}"
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("AWS_ENDPOINT_URL", endpoint)
            environment.setenv("AWS_ACCESS_KEY_ID", "test")
            environment.setenv("AWS_SECRET_ACCESS_KEY", "test")
            environment.setenv("AWS_DEFAULT_REGION", "us-east-1")
            environment.setenv("AWS_EC2_METADATA_DISABLED", "true")  # or Arrow asks 169.254.169.254 first
            _make_bucket(f"{endpoint}/{bucket}", server)
            yield f"s3://{bucket}"
    finally:
        server.terminate()
        server.wait(timeout=30)


def _make_bucket(url: str, server: "subprocess.Popen[bytes]") -> None:
    """Put the bucket, as soon as the server answers."""
    deadline = time.monotonic() + 120
    while True:
        try:
            urllib.request.urlopen(urllib.request.Request(url, method="PUT"), timeout=60).close()
            return
        except OSError:  # not there yet, or slow to answer
            if server.poll() is not None or time.monotonic() > deadline:
                raise
            time.sleep(0.1)


@pytest.fixture(scope="session")
def ray_cluster(s3: str) -> Iterator[None]:
    """One Ray cluster for all tests; it starts after the S3 server, so that its workers know where that is."""
    import ray

    root = Path(raygpt.__file__).parents[1]
    with pytest.MonkeyPatch.context() as environment:
        if root.name != "site-packages":  # not installed: workers find it where this process found it
            environment.setenv("PYTHONPATH", str(root), prepend=os.pathsep)
        with environment.context() as quickly:  # see compiled_quickly; of the workers alone
            quickly.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
            ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        yield
        ray.shutdown()


@pytest.fixture(scope="session")
def trained_run(ray_cluster, tmp_path_factory):
    """The folder of a small run of an engine, made once, by the command: 20 steps on a text that repeats itself.

    Beside it lie its tokens and what the command printed, said.txt.
    """
    made = {}

    def of(engine: str) -> Path:
        if engine not in made:
            made[engine] = _train(engine, tmp_path_factory.mktemp(f"{engine}-runs"))
        return made[engine]

    return of


SMALL = "model.layers=2 model.heads=2 model.width=32 model.context=32 training.batch_tokens=128 data.tokenizer=bytes"
SHORT = "training.steps=20 training.log_every=5 training.eval_every=10 training.checkpoint_every=10"
LEARNS = "optimizer.learning_rate=0.01 run.name=small"
OF_ENGINE = {
    "jax": "tiny --profile 12:14",
    # The tutorial's, on two workers, but for its size and its text
    "torch": "gpt2-124m-wikitext103-smoke model.preset=null data.val=0.05 data.limit=null",
}


def _train(engine: str, home: Path) -> Path:
    import numpy as np

    tokens, text = home / "tokens", np.frombuffer("the café sat on the mat; ".encode(), dtype=np.uint8)
    tokens.mkdir()
    np.resize(text, 4000).astype("<u2").tofile(tokens / "train.bin")
    np.resize(text, 10 * 32 + 5).astype("<u2").tofile(tokens / "val.bin")
    words = f"train {OF_ENGINE[engine]} {SMALL} {SHORT} {LEARNS}".split()
    words += [f"data.source={tokens}", f"run.storage={home}", "training.prompts=[the caf, 'on ']"]
    if engine == "jax" and importlib.util.find_spec("tensorboardX"):
        words.append("track.tensorboard=true")
    with (home / "said.txt").open("w") as said, contextlib.redirect_stdout(said), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["raygpt", *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
    assert not ended.value.code, (home / "said.txt").read_text()
    return home / "small"


@pytest.fixture(name="raygpt")
def raygpt_command(monkeypatch, capsys, tmp_path):
    """Run a command line in an empty folder: (exit status, standard output, standard error)."""
    monkeypatch.chdir(tmp_path)

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["raygpt", *map(str, words)])
        status = 0
        try:
            cli.main()
        except SystemExit as stop:
            status = int(stop.code or 0)
        output = capsys.readouterr()
        return status, output.out, output.err

    return run
