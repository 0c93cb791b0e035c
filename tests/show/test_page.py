"""The report page: whole in one file, true to the metrics, and drawn by a real browser where there is one."""

import itertools
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from directories import logged, make_run

from raygpt.runs import checkpoints, open_run
from raygpt.show.page import page, spread
from raygpt.show.report import write_report

BROWSER = next((found for name in ("chromium", "google-chrome", "chrome") if (found := shutil.which(name))), None)


@pytest.fixture
def one(tmp_path):
    lines = [{"step": 0, "val_loss": 8.0, "time": 1000.0}, *logged(range(10, 101, 10), lambda step: 8 - step / 25)]
    lines += [{"step": 50, "restart": True, "time": 1100.0}, {"step": 100, "val_loss": 4.25, "time": 1200.0}]
    return make_run(tmp_path, "one", lines, samples=[(0, "</script><b>noise & more"), (100, "words")])


@pytest.fixture
def two(tmp_path):
    lines = logged(range(10, 101, 10), lambda step: 7 - step / 25, mfu=0.4)
    return make_run(tmp_path, "two", lines, {"optimizer.learning_rate": 0.002, "training.batch_tokens": 8192})


def data_of(html):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)[1])


class Addresses(HTMLParser):
    """Everything that a browser would fetch or follow."""

    def __init__(self):
        super().__init__()
        self.found, self.tags = [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.found += [value for name, value in attributes if name in ("src", "href", "srcset", "data")]


def test_the_page_is_one_file_that_fetches_nothing(one, two):
    html = page([open_run(one), open_run(two)])
    parser = Addresses()
    parser.feed(html)
    assert parser.found == []
    assert not {"link", "img", "iframe", "object"} & set(parser.tags)
    styles = "".join(re.findall(r"<style>(.*?)</style>", html, re.DOTALL))
    assert "url(" not in styles
    assert "@import" not in styles
    assert not re.search(r"fetch\(|XMLHttpRequest|import\(", html)


def test_the_page_carries_the_metrics_and_no_text_of_a_run_can_break_it(one):
    html = page([open_run(one)])
    (run,) = data_of(html)["runs"]
    assert run["train"]["step"] == list(range(10, 101, 10))
    assert run["train"]["loss"] == [pytest.approx(8 - step / 25) for step in range(10, 101, 10)]
    assert run["val"] == {"step": [0, 100], "time": [0.0, 200.0], "loss": [8.0, 4.25]}
    assert run["restarts"]["step"] == [50]
    assert "&lt;/script&gt;&lt;b&gt;noise &amp; more" in html
    assert html.count("</script>") == 2
    assert "some accelerator" in html
    assert "learning_rate: 0.001" in html


def test_compared_runs_show_only_where_their_recipes_differ(one, two):
    html = page([open_run(one), open_run(two)])
    table = html.split("Where the recipes differ")[1].split("</table>")[0]
    keys = re.findall(r"<th><code>(.*?)</code>", table)
    assert keys == ["optimizer.learning_rate", "training.batch_tokens"]
    assert "<code>0.001</code></td><td><code>0.002</code>" in table
    assert data_of(html)["band"] is None  # they are not of one recipe


def test_the_page_names_the_best_checkpoint_and_its_loss(one):
    for step, loss in ((50, 5.5), (75, 4.125), (100, 4.25)):
        checkpoints.commit(checkpoints.folder_of(one, step), step, {"engine": "jax"}, {})
        checkpoints.write_score(one, step, loss)
    html = page([open_run(one)])
    assert "<b>4.1250</b><span>best checkpoint" in html
    rows = [re.findall(r"<td[^>]*>([^<]*)</td>", row) for row in html.split("<tr><th>one</th>")[1:]]
    assert [(row[0], row[1], row[3]) for row in rows] == [
        ("50", "5.5000", ""),
        ("75", "4.1250", "best"),
        ("100", "4.2500", ""),
    ]


def test_runs_of_a_recipe_with_a_reference_carry_its_band(one):
    band = data_of(page([open_run(one)]))["band"]
    assert (band["recipe"], band["batch_tokens"], band["steps"][-1]) == ("tiny", 4096, 200)
    assert all(low < high for low, high in zip(band["low"], band["high"], strict=True))


def test_a_long_run_still_makes_a_small_page(tmp_path):
    folder = make_run(tmp_path, "long", logged(range(1, 100_001), lambda step: 2 + 9 / step, mfu=0.123456))
    assert len(page([open_run(folder)])) < 200_000


def test_samples_are_spread_from_the_first_to_the_last():
    assert spread(list(range(11)), 4) == [0, 3, 7, 10]
    assert spread([1, 2], 4) == [1, 2]


def render(html, tmp_path, script=""):
    """The page as a browser has it after its scripts, and one more, have run."""
    file = tmp_path / "page.html"
    file.write_text(html.replace("</body>", f"<script>{script}</script></body>"))
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--window-size=1200,2000", "--virtual-time-budget=4000"]
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    done = subprocess.run([BROWSER, *flags, profile, "--dump-dom", f"file://{file}"], capture_output=True, timeout=120)
    return done.stdout.decode()


def curves(dom, key):
    """The points of each curve of a chart."""
    chart = dom.split(f'data-key="{key}"')[1].split("</svg>")[0]
    paths = re.findall(r'class="curve \w+" d="([^"]*)"', chart)
    return [[tuple(map(float, point.split(","))) for point in re.split("[ML]", path)[1:]] for path in paths]


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
def test_a_browser_draws_every_point_of_every_curve(one, two, tmp_path):
    dom = render(page([open_run(one)]), tmp_path)
    train, val = curves(dom, "loss")
    assert (len(train), len(val)) == (10, 2)
    x, y = zip(*train, strict=True)
    assert all(b - a == pytest.approx(x[1] - x[0], abs=0.2) for a, b in itertools.pairwise(x))  # even steps
    assert all(b - a == pytest.approx(y[1] - y[0], abs=0.2) for a, b in itertools.pairwise(y))  # even falls
    assert y[-1] > y[0]  # down the page
    assert val[1][0] == x[-1]  # both at step 100
    assert val[1][1] < y[-1]  # 4.25 lies above 4.0
    for key in ("lr", "grad_norm", "tokens_per_s", "data_wait_s"):
        assert [len(curve) for curve in curves(dom, key)] == [10]
    assert 'data-key="mfu"' not in dom  # nothing to show
    assert dom.count('class="restart-mark"') == 5  # in each chart
    assert dom.count("<polygon") == 1
    assert "NaN" not in dom.split("<script")[0]


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
def test_a_browser_compares_runs_by_tokens_shows_values_and_turns_dark(one, two, tmp_path):
    script = """
    document.getElementById("x-tokens").click(); document.getElementById("theme").click();
    const first = document.querySelector(".chart"), box = first.querySelector("svg").getBoundingClientRect();
    first.dispatchEvent(new PointerEvent("pointermove", { clientX: box.right - 12, clientY: box.top + 40 }));
    """
    dom = render(page([open_run(one), open_run(two)]), tmp_path, script)
    first, _, second = curves(dom, "loss")
    assert second[-1][0] - second[0][0] == pytest.approx(2 * (first[-1][0] - first[0][0]), abs=0.5)  # twice the batch
    tip = re.sub("<[^>]*>", " ", dom.split('class="tip"')[1].split(">", 1)[1].split("</div></div>")[0])
    assert tip.split() == ["tokens", "819.2", "k", "two", "training", "3.0000"]  # 7 - 100 / 25; one has ended before
    assert 'data-theme="dark"' in dom


def test_a_report_is_written_beside_the_run_or_where_it_is_told(raygpt, one, two, tmp_path):
    status, out, _ = raygpt("report", one)
    assert status == 0
    assert out.startswith("one/report.html  ")
    assert Path(one, "report.html").read_text() == page([open_run(one)])
    status, out, _ = raygpt("report", one, two, "--out", "both.html", "--png", "both.png", "--json")
    assert status == 0
    files = json.loads(out)["files"]
    assert files == {str(tmp_path / name): (tmp_path / name).stat().st_size for name in ("both.png", "both.html")}


def test_the_picture_is_a_png_of_a_readmes_size(one, two, tmp_path):
    from matplotlib import image

    write_report([one, two], str(tmp_path / "page.html"), str(tmp_path / "curves.png"))
    pixels = image.imread(tmp_path / "curves.png")
    assert pixels.shape[:2] == (896, 1440)
    for colour in ("#0072b2", "#d55e00"):  # a curve for each run
        wanted = [int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5)]
        assert (abs(pixels[..., :3] - wanted).max(axis=-1) < 0.02).sum() > 300


def test_a_missing_extra_ends_in_a_line_that_names_it(raygpt, one, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    status, out, err = raygpt("report", one, "--png", "a.png")
    assert (status, out) == (1, "")
    assert err == "error: a PNG needs the extra png: pip install 'raygpt[png]'\n"
    assert not Path(one, "report.html").exists()


def test_a_run_that_has_logged_nothing_is_refused(raygpt, tmp_path):
    folder = make_run(tmp_path, "empty", [])
    status, _, err = raygpt("report", folder)
    assert (status, err) == (1, f"error: {folder} has not logged a loss yet; train it further: raygpt train\n")
