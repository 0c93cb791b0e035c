"""The report page: whole in one file, true to the metrics, and drawn by a real browser where there is one."""

import itertools
import json
import math
import re
import shutil
import subprocess
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest
from directories import logged, make_run

from raygpt.runs import checkpoints, open_run
from raygpt.show.page import page, spread
from raygpt.show.report import loss_picture

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


def curves(html, key, view):
    """The points of each curve in a view of a chart."""
    plot = html.split(f'data-key="{key}"')[1].split(f'data-view="{view}"')[1].split("</g></svg>")[0]
    paths = re.findall(r'<path [^>]* d="([^"]*)"', plot)
    wide, tall = map(float, re.search(r'data-units="(\S+) (\S+)"', plot).groups())
    points = [[point.split(",") for point in re.split("[ML]", path)[1:]] for path in paths]
    return [[(float(x) * wide, float(y) * tall) for x, y in path] for path in points]


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
    steps = range(10, 101, 10)
    losses = [8 - step / 25 for step in steps]
    train, val = curves(html, "loss", "step")
    assert train == [(step, pytest.approx(loss)) for step, loss in zip(steps, losses, strict=True)]
    assert val == [(0, 8.0), (100, 4.25)]
    assert curves(html, "loss", "tokens")[1] == [(0, 8.0), (100 * 4096, 4.25)]
    assert curves(html, "loss", "time")[1] == [(0, 8.0), (200, 4.25)]
    assert curves(html, "loss", "step log")[0][-1] == (100, pytest.approx(math.log10(losses[-1]), abs=1e-5))
    assert curves(html, "loss", "step late")[1] == [(100, 4.25)]
    assert "one was restarted after step 50" in html
    assert "&lt;/script&gt;&lt;b&gt;noise &amp; more" in html
    assert html.count("</script>") == 1
    assert "some accelerator" in html
    assert "learning_rate: 0.001" in html


def test_compared_runs_show_only_where_their_recipes_differ(one, two):
    html = page([open_run(one), open_run(two)])
    table = html.split("Where the recipes differ")[1].split("</table>")[0]
    keys = re.findall(r"<th><code>(.*?)</code>", table)
    assert keys == ["optimizer.learning_rate", "training.batch_tokens"]
    assert "<code>0.001</code></td><td><code>0.002</code>" in table


def test_the_page_names_the_best_checkpoint_and_its_loss(one):
    for step, loss in ((50, 5.5), (75, 4.125), (100, 4.25)):
        checkpoints.commit(checkpoints.folder_of(one, step), step, {"engine": "jax"}, {})
        checkpoints.write_val_loss(one, step, loss)
    html = page([open_run(one)])
    assert "<b>4.1250</b><span>best checkpoint" in html
    rows = [re.findall(r"<td[^>]*>([^<]*)</td>", row) for row in html.split("<tr><th>one</th>")[1:]]
    assert [(row[0], row[1], row[3]) for row in rows] == [
        ("50", "5.5000", ""),
        ("75", "4.1250", "best"),
        ("100", "4.2500", ""),
    ]


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
    flags += ["--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"]
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    done = subprocess.run([BROWSER, *flags, profile, "--dump-dom", f"file://{file}"], capture_output=True, timeout=120)
    return done.stdout.decode()


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
def test_a_browser_draws_each_point_at_its_place_beside_the_labels(one, tmp_path):
    script = """
    const plot = document.querySelector(".plot"), box = plot.getBoundingClientRect(), found = [];
    for (const path of plot.querySelectorAll("path")) {
      const to = path.getScreenCTM();
      for (const [x, y] of pointsOf(path)) {
        const at = new DOMPoint(x / unitsOf(plot)[0], y / unitsOf(plot)[1]).matrixTransform(to);
        found.push([at.x - box.left, at.y - box.top]);
      }
    }
    const dots = [...plot.querySelectorAll("circle")].map((dot) => dot.getBoundingClientRect());
    found.push(...dots.map((dot) => [dot.x + dot.width / 2 - box.left, dot.y + dot.height / 2 - box.top]));
    const visible = [...document.querySelectorAll(".plot")].filter((plot) => plot.getClientRects().length);
    const figures = { points: found, box: [box.width, box.height], visible: visible.length };
    document.body.dataset.found = JSON.stringify(figures);
    """
    dom = render(page([open_run(one)]), tmp_path, script)
    found = json.loads(unescape(re.search(r'data-found="([^"]*)"', dom)[1]))
    width, height = found["box"]
    assert height == 280  # a chart is as high as the style says, and as wide as the page has room for
    assert width > 900
    points, val, dots = found["points"][:10], found["points"][10:12], found["points"][12:]
    x, y = zip(*points, strict=True)
    assert x == pytest.approx([width * step / 100 for step in range(10, 101, 10)], abs=0.5)
    assert all(b - a == pytest.approx(y[1] - y[0], abs=0.2) for a, b in itertools.pairwise(y))  # even falls
    assert 0 < y[0] < y[-1] < height  # down the page
    assert val[1][1] < y[-1]  # 4.25 lies above 4.0
    for dot, end in zip(dots, val, strict=True):
        assert dot == pytest.approx(end, abs=0.5)
    assert found["visible"] == 5  # loss, learning rate, gradient norm, speed, waiting: one view each
    assert 'data-key="mfu"' not in dom  # nothing to show
    assert "NaN" not in dom.split("<script")[0]


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
def test_a_browser_compares_runs_by_tokens_shows_values_hides_a_run_and_turns_dark(one, two, tmp_path):
    script = """
    document.getElementById("x-tokens").click(); document.getElementById("theme").click();
    const first = document.querySelector(".chart");
    const move = () => {
      const box = shown(first).getBoundingClientRect();
      first.dispatchEvent(new PointerEvent("pointermove", { clientX: box.right - 1, clientY: box.top + 40 }));
      return [...document.querySelector(".tip").childNodes].map((node) => node.textContent.trim());
    };
    const tips = [move()];
    document.getElementById("log").click();
    tips.push(move());
    document.querySelectorAll(".legend button")[0].click();
    const hidden = getComputedStyle(shown(first).querySelector("path")).display;
    document.body.dataset.found = JSON.stringify({ tips, hidden, view: shown(first).dataset.view });
    """
    dom = render(page([open_run(one), open_run(two)]), tmp_path, script)
    found = json.loads(unescape(re.search(r'data-found="([^"]*)"', dom)[1]))
    # 7 - 100 / 25; the other run, of half the batch, has ended before
    assert found["tips"] == [["819,200 tokens", "two training 3.0000"]] * 2
    assert (found["view"], found["hidden"]) == ("tokens log", "none")
    assert 'data-theme="dark"' in dom


def test_a_report_is_written_beside_the_run_or_where_it_is_told(raygpt, one, two, tmp_path):
    status, out, _ = raygpt("report", one)
    assert status == 0
    assert out.startswith("one/report.html  ")
    assert Path(one, "report.html").read_text() == page([open_run(one)])
    status, out, _ = raygpt("report", one, two, "--out", "both.html", "--svg", "both.svg", "--json")
    assert status == 0
    files = json.loads(out)["files"]
    assert files == {str(tmp_path / name): (tmp_path / name).stat().st_size for name in ("both.svg", "both.html")}


def test_the_picture_of_several_runs_names_them(one, two):
    text = loss_picture([open_run(one), open_run(two)])
    assert "<title>training loss (faint) and validation loss</title>" in text
    assert re.findall("<tspan[^>]*>([^<]*)</tspan>", text) == ["one", "two"]
    assert text.count("<path") == 3  # two's validation has not begun


def test_a_run_that_has_logged_nothing_is_refused(raygpt, tmp_path):
    folder = make_run(tmp_path, "empty", [])
    status, _, err = raygpt("report", folder)
    assert (status, err) == (1, f"error: {folder} has not logged a loss yet; train it further: raygpt train\n")


def test_a_run_whose_losses_are_not_numbers_is_refused_as_such(raygpt, tmp_path):
    folder = make_run(tmp_path, "diverged", logged([10, 20], lambda step: math.nan))
    remedy = "begin another run with a lower optimizer.learning_rate"
    assert raygpt("report", folder)[::2] == (1, f"error: {folder} has logged no loss that is a number; {remedy}\n")
