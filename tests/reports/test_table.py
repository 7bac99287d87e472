"""One table, three forms, and nothing in a cell is read as markup."""

import pytest

from hydra_transformers.reports import Cell, Table
from hydra_transformers.reports.table import escape_markdown


HOSTILE = "x|y\n<script>alert(1)</script> [free](http://evil) **b** `c` &lt; \x1b[2J"


def test_a_cell_shows_hostile_text_and_runs_none_of_it():
    table = Table(["Model", HOSTILE], [[HOSTILE, Cell(HOSTILE, "bold")], [Cell(HOSTILE, "code"), "1"]])
    markdown = table.markdown().splitlines()
    assert len(markdown) == 4
    for line in markdown[:3]:
        assert "<script" not in line
        assert "](" not in line.replace("\\](", "")
    assert [line.replace("\\|", "").count("|") for line in markdown] == [3, 3, 3, 3]
    page = table.html()
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    text = table.text()
    assert "\x1b" not in text
    assert len(text.splitlines()) == 4


@pytest.mark.parametrize("name", ["hydra_vit", "google/vit-base", "a (b), 3 %", "é → ü", "-", ""])
def test_plain_names_stay_as_they_are(name):
    assert escape_markdown(name) == name


def test_a_renderer_shows_the_text_again():
    markdown_it = pytest.importorskip("markdown_it")
    render = markdown_it.MarkdownIt("commonmark").enable("table").render
    name = r"<b>*a*</b> _x_ [l](u) \d &amp; `c` a|b ![i](j)"
    page = render(Table(["Model", "n"], [[name, "1"]]).markdown())
    shown = name.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    assert f"<td>{shown}</td>" in page


def test_columns_are_aligned_as_asked():
    table = Table(["a", "b", "c"], [["1", "2", "3"]], "lcr")
    assert table.markdown().splitlines()[1] == "| --- | :-: | --: |"
    assert table.html().count('style="text-align: center"') == 2
    assert table.html().count("style=") == 2


def test_a_wide_table_goes_on_below():
    table = Table(["name", "first", "second"], [["a", "1", "2"]])
    assert table.text(width=14).splitlines() == [
        "name   first",
        "------------",
        "a          1",
        "",
        "name   second",
        "-------------",
        "a           2",
    ]


def test_a_row_of_another_length_is_refused():
    with pytest.raises(ValueError, match="3 columns"):
        Table(["a", "b", "c"], [["1", "2"]])
