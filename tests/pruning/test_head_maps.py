"""Circuits and maps of heads, as notebooks show them."""

from xml.etree import ElementTree

from hydra_transformers.pruning import Circuit, HeadMap


def test_a_circuit_shows_itself_in_a_notebook():
    made_from = {"kept_heads": [[[0, 1, 2]], [[0, 2]]]}
    circuit = Circuit([(1, 2), (0, 0)], [0.75, 0.5], 0.7, "avg", made_from=made_from)
    page = circuit._repr_html_()
    assert page.count("<rect") == 5  # head (1, 1) was not there
    assert "avg: order of 2 removals" in page and "0.700 with all heads, 0.750 without the first 1" in page
    order = {(0, 0): 2, (0, 1): 3, (0, 2): 3, (1, 0): 3, (1, 2): 1}
    assert circuit.head_map().maps["avg: order of 2 removals"] == order
    assert Circuit([(1, 2)], [0.7], 0.7, "acc")._repr_html_().count("<rect") == 1  # of a circuit that knows no model


def test_the_darkest_cell_is_the_highest_and_names_are_not_taken_for_tags():
    page = HeadMap({"<b>": {(0, 0): 0.0, (0, 1): 2.0}})._repr_html_()
    assert ElementTree.fromstring(page).tag == "div"
    assert "&lt;b&gt;" in page and 'fill="#EFF3F8"' in page and 'fill="#005AA0"' in page
