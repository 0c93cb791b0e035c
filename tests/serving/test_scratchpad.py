"""The page, driven in a real browser: write, stream, stop, undo, branch, take another token, compare, link, follow."""

import pytest
from browser import chromium
from local_server import serving, two_models
from small_model import served

pytest.importorskip("uvicorn", reason="needs the extra serve")
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")

TEXT = "document.querySelector('#editor').textContent"
TOKENS = "document.querySelectorAll('#editor .token').length"
DONE = "!running && Boolean(origin)"


@pytest.fixture(scope="module")
def local_models():
    with two_models() as made:
        yield made


@pytest.fixture(scope="module")
def address(local_models):
    with serving(local_models) as url:
        yield url


@pytest.fixture(scope="module")
def tab():
    with chromium() as made:
        yield made


@pytest.fixture
def page(tab, address):
    """The page of two models, empty."""
    tab.size(1100, 800)
    tab.open(address)
    tab.wait("models.length === 2 && document.activeElement.id === 'editor'")
    tab.run("options.elements.top_k.value = 40; options.elements.max_tokens.value = 12; outputs()")
    yield tab
    assert tab.complaints == []


def written(page, prompt="The cat"):
    """What the page shows after a prompt was continued."""
    page.type(prompt)
    page.key("Enter", 2)
    page.wait(DONE)
    return page.run(TEXT)


def test_text_is_continued_from_the_keyboard_and_each_token_is_coloured(page):
    text = written(page)
    assert text.startswith("The cat")
    assert page.run(TOKENS) > 0
    doubts = page.run("[...document.querySelectorAll('.token')].map((t) => +t.style.getPropertyValue('--doubt'))")
    assert all(0 <= doubt <= 1 for doubt in doubts)
    assert len(set(doubts)) > 1
    assert "step 7" in page.run("status.textContent")


def test_it_goes_on_from_the_cursor(page):
    page.type("ab cd")
    page.run("getSelection().collapse(editor.firstChild, 2)")
    page.run("document.querySelector('#go').click()")
    page.wait(DONE)
    assert page.run("plain(origin.before)") == "ab"
    assert page.run(TEXT).startswith("ab")


def test_undo_and_redo_lead_back_and_forth(page):
    text = written(page)
    page.key("z", 2)
    assert page.run(TEXT) == "The cat"
    page.key("z", 10)
    assert page.run(TEXT) == text
    assert page.run(TOKENS) > 0, "with its colours"


def test_branches_are_kept_and_one_can_turn_to_each(page):
    first = written(page)
    page.run("document.querySelector('#again').click()")
    page.wait(f"{DONE} && branches.length === 2")
    other = page.run(TEXT)
    assert other != first
    assert other.startswith("The cat")
    page.run("document.querySelector('#before').click()")
    assert (page.run(TEXT), page.run("document.querySelector('#which').textContent")) == (first, "1/2")
    page.run("document.querySelector('#after').click()")
    assert page.run(TEXT) == other


def test_another_token_can_be_taken_from_the_keyboard_and_the_text_goes_on_from_it(page):
    written(page)
    page.run("openTops(document.querySelectorAll('#editor .token')[0], true)")
    shown = page.run("document.querySelectorAll('#tops button').length")
    assert shown >= 10
    wanted = page.run(
        "(() => { const token = document.querySelectorAll('#editor .token')[0].token;"
        " return token.top.findIndex(([text]) => text !== token.text && text.length === 1 && text >= ' ') })()"
    )
    name = page.run(f"document.querySelectorAll('#editor .token')[0].token.top[{wanted}][0]")
    for _ in range(wanted):
        page.key("ArrowDown")
    page.run("document.activeElement.click()")
    page.wait(f"{DONE} && plain(origin.before).length === 8")
    assert page.run(TEXT).startswith("The cat" + name)


def test_a_text_can_be_stopped(page):
    page.run("options.elements.max_tokens.value = 70")
    page.type("x")
    page.run("document.querySelector('#go').click(); document.querySelector('#stop').click()")
    page.wait("!running && document.querySelector('#stop').disabled")
    page.wait("status.textContent === 'stopped'")
    assert page.run("editor.contentEditable") == "true"
    assert page.run(TEXT).startswith("x")


def test_two_models_write_side_by_side(page):
    page.run("document.querySelector('#compare').click()")
    text = written(page)
    other = page.run("document.querySelector('#second').textContent")
    assert other.startswith("The cat")
    assert other != text
    left, right = (
        page.run(f"document.querySelector('#{name}').getBoundingClientRect().left") for name in ("editor", "second")
    )
    assert right > left + 100


def test_a_link_shows_the_same_again(page):
    text = written(page)
    link = page.run("linked()")
    page.open(link)
    page.wait(DONE)
    assert page.run(TEXT) == text


def test_a_text_longer_than_the_context_goes_on_after_its_last_tokens(page):
    assert written(page, "word " * 40).startswith("word " * 40)
    assert page.run(TOKENS) > 0


def test_on_a_phone_nothing_is_wider_than_the_screen(page):
    page.size(360, 740, mobile=True)
    written(page, "A long line that has to be broken " * 2)
    page.run("document.querySelector('#compare').click()")
    assert page.run("document.documentElement.scrollWidth") <= 360


def test_in_the_dark_the_paper_is_dark(page):
    page.dark()
    dark = page.run("getComputedStyle(document.body).backgroundColor")
    page.dark(False)
    assert dark != page.run("getComputedStyle(document.body).backgroundColor")


def test_a_new_checkpoint_moves_the_curve_and_answers_the_prompt_again(page, local_models):
    written(page)
    model = local_models["one"]
    curve = page.wait("document.querySelector('#curve path')?.getAttribute('d')")
    old = model._batch.served
    try:
        model.curve.append([9, 3.0])
        model._batch.served = served(model.reader, seed=4, step=9)
        page.wait("document.querySelectorAll('#answers li').length > 0")
        assert page.run("document.querySelector('#answers li').textContent").startswith("step 9The cat")
        assert page.run("document.querySelector('#step').textContent") == "step 9"
        assert page.run("document.querySelector('#curve path').getAttribute('d')") != curve
    finally:
        model._batch.served = old


def test_an_error_of_the_server_is_told(page):
    page.run(
        "loadModels = async () => {};"  # which would take the next line back within a second
        " models.forEach((m) => { m.max_model_len = 9999 });"
        " options.elements.max_tokens.max = 5000; options.elements.max_tokens.value = 500"
    )
    page.type("x")
    page.key("Enter", 2)
    page.wait("status.classList.contains('bad')")
    assert "the model sees 80" in page.run("status.textContent")
    page.complaints.clear()  # the browser's own line about the status
