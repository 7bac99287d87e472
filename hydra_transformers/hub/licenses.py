"""Licenses by the names the Hub gives them."""

import difflib
import warnings


NAMES = """
    apache-2.0 mit openrail bigscience-openrail-m creativeml-openrail-m bigscience-bloom-rail-1.0 bigcode-openrail-m
    afl-3.0 artistic-2.0 bsl-1.0 bsd bsd-2-clause bsd-3-clause bsd-3-clause-clear c-uda cc cc0-1.0 cc-by-2.0 cc-by-2.5
    cc-by-3.0 cc-by-4.0 cc-by-sa-3.0 cc-by-sa-4.0 cc-by-nc-2.0 cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nd-4.0 cc-by-nc-nd-3.0
    cc-by-nc-nd-4.0 cc-by-nc-sa-2.0 cc-by-nc-sa-3.0 cc-by-nc-sa-4.0 cdla-sharing-1.0 cdla-permissive-1.0
    cdla-permissive-2.0 wtfpl ecl-2.0 epl-1.0 epl-2.0 etalab-2.0 eupl-1.1 eupl-1.2 agpl-3.0 gfdl gpl gpl-2.0 gpl-3.0 lgpl
    lgpl-2.1 lgpl-3.0 isc lppl-1.3c ms-pl mpl-2.0 odc-by odbl openrail++ osl-3.0 postgresql ofl-1.1 ncsa unlicense zlib
    pddl lgpl-lr deepfloyd-if-license llama2 llama3 llama3.1 llama3.2 llama3.3 llama4 gemma apple-ascl apple-amlr
    h-research intel-research fair-noncommercial-research-license unknown other
"""
LICENSES = frozenset(NAMES.split())


def warn_of_unknown_license(license: str | None) -> None:
    """The Hub takes only names it knows; that list grows, so a name that is not in ours is told of, not refused."""
    if license is None or license in LICENSES:
        return
    if not license.isprintable():
        raise ValueError(f"license is {license!r}: pass a license id of the Hub such as 'apache-2.0'")
    similar = difflib.get_close_matches(license.lower().replace(" ", "-"), LICENSES, n=1)
    instead = f"do you mean {similar[0]!r}?" if similar else "for one of your own it is 'other'"
    warnings.warn(f"the Hub may not know the license {license!r}: {instead}", stacklevel=3)
