"""The page of a token store: how long its documents are, what they are written in, and some of its text."""

from collections.abc import Iterator
from html import escape
from typing import Any

from raygpt.show import chart
from raygpt.show.page import document, tiles


def data_page(shown: dict[str, Any]) -> str:
    """The whole page, from the facts of `raygpt data show`."""
    name = shown["folder"].rstrip("/").rpartition("/")[2]
    about = f"Tokens of {shown['source']}. Lengths, copies and characters are of a sample of "
    about += f"{shown.get('sampled_documents', 0):,} documents with {shown.get('sampled_tokens', 0):,} tokens."
    body = [
        f'<header><div><h1>{escape(name)}</h1><p class="soft">{escape(about)}</p></div></header><main>',
        _tiles(shown),
        *(_charts(shown) if shown.get("lengths") else ()),
        "<h2>Text</h2>",
        '<div class="samples">',
        *(f'<div class="sample card"><pre>{escape(row["text"].strip())}</pre></div>' for row in shown["rows"]),
        "</div>",
        "</main>",
    ]
    return document(name, body)


def _tiles(shown: dict[str, Any]) -> str:
    figures = [
        ("documents", f"{shown['documents']:,}"),
        ("tokens to train on", chart.short(shown["train_tokens"])),
        ("to validate", chart.short(shown["val_tokens"])),
    ]
    if shown.get("lengths"):
        figures += [
            ("bytes per token", f"{shown['bytes_per_token']:.2f}"),
            ("tokens of the median document", f"{shown['median_document']:,}"),
            ("of the longest", f"{shown['longest_document']:,}"),
            ("of the documents are copies of others", f"{shown['share_of_copies']:.2%}"),
        ]
    return tiles(figures)


def _charts(shown: dict[str, Any]) -> Iterator[str]:
    yield "<h2>Documents by length, in tokens</h2>"
    yield '<div class="charts">'
    for title, count in (("documents", "documents"), ("tokens in them", "tokens")):
        total = sum(row[count] for row in shown["lengths"])
        bars = [
            chart.Bar(_range(row["from"]), row[count], f"{row[count]:,} · {row[count] / total:.1%}")
            for row in shown["lengths"]
        ]
        yield f'<div class="chart card wide"><h3>{title}</h3>{chart.bar_rows(bars, colours=1)}</div>'
    yield "</div>"
    yield "<h2>Characters</h2>"
    characters = [chart.Bar(name, share, f"{share:.1%}") for name, share in shown["shares_of_characters"].items()]
    yield f'<div class="chart card wide">{chart.bar_rows(characters, colours=1)}</div>'


def _range(first: int) -> str:
    """'512 to 1,023'"""
    return "1" if first == 1 else f"{first:,} to {2 * first - 1:,}"
