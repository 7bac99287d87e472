"""One table, three forms, and nothing in a cell is read as markup."""

import pytest

from hydra_transformers.reports.table import escape_markdown, html_table, markdown_table, text_table, to_markdown


HOSTILE = "x|y\n<script>alert(1)</script> [free](http://evil) **b** `c` &lt; \x1b[2J"


def test_a_cell_shows_hostile_text_and_runs_none_of_it():
    table = (["Model", HOSTILE], [[HOSTILE, HOSTILE], [HOSTILE, "1"]])
    markdown = markdown_table(*table).splitlines()
    assert len(markdown) == 4 and [line.replace("\\|", "").count("|") for line in markdown] == [3, 3, 3, 3]
    for line in markdown:
        assert "<script" not in line and "](" not in line.replace("\\](", "")
    page = html_table(*table)
    assert "<script" not in page and "&lt;script&gt;" in page
    text = text_table(["Model", "n"], [[HOSTILE, "1"]])
    assert "\x1b" not in text and len(text.splitlines()) == 2
    for name in ("hydra_vit", "google/vit-base", "a (b), 3 %", "é → ü", "-", ""):
        assert escape_markdown(name) == name
    assert "\n\\# a" in to_markdown([("t", ["# a"])])


def test_a_renderer_shows_the_text_again():
    markdown_it = pytest.importorskip("markdown_it")
    render = markdown_it.MarkdownIt("commonmark").enable("table").render
    name = r"<b>*a*</b> _x_ [l](u) \d &amp; `c` a|b ![i](j)"
    page = render(markdown_table(["Model", "n"], [[name, "1"]]))
    shown = name.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    assert f"<td>{shown}</td>" in page


def test_a_wide_table_goes_on_below():
    text = text_table(["Model", *(f"a column of number {n}" for n in range(12))], [["one", *"123456789012"]])
    assert max(map(len, text.splitlines())) <= 125 and text.count("one") > 1 and "number 11" in text
