"""Measure how much each line of Python code carries, per folder or file.

    python scripts/density.py hydra_transformers/pruning benchmarks
    python scripts/density.py --files hydra_transformers/reports   # every file in a row of its own

Columns, with the state that code in this repository aims at:

- lines: lines that hold code; blank lines, comments, docstrings and lone brackets do not count
- nodes: nodes of the syntax tree per code line; 8 to 9
- ternaries, pairs, comprehensions: conditional expressions (at most 20), assignments `a, b = x, y` (at most 5) and
  comprehensions, per 1,000 code lines
- comments: comment lines in % of the lines with code, docs or comments; 4 or more, none of which repeats its line
- long functions: functions of more than 60 lines
- long lines: lines of more than 119 characters; wide docs: lines of comments and docstrings of more than 100
"""

import argparse
import ast
import io
import tokenize
from collections import Counter
from pathlib import Path


COLUMNS = ["lines", "nodes", "ternaries", "pairs", "comprehensions", "comments", "long functions", "long lines"]
COLUMNS.append("wide docs")
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
WITHOUT_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
BRACKETS = set("()[]{},")
MOST_LINES_OF_A_FUNCTION = 60
LONGEST_LINE = 119
LONGEST_LINE_OF_DOCS = 100


def docstring_lines(tree: ast.AST) -> set[int]:
    """Return the numbers of all lines on which a docstring stands."""
    numbers = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            numbers.update(range(node.lineno, node.end_lineno + 1))
    return numbers


def is_pair(node: ast.AST) -> bool:
    """Whether a statement assigns several values to as many names: `a, b = x, y`."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
        return False
    return any(isinstance(target, ast.Tuple) for target in node.targets)


def count(path: Path) -> Counter:
    """Count what the columns of the table are made of, in one file."""
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)

    # Lines: with code, with a comment, with a docstring.
    docs = docstring_lines(tree)
    code = set()
    comments = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            comments.add(token.start[0])
        if token.type not in WITHOUT_CODE and token.string not in BRACKETS:
            code.update(range(token.start[0], token.end[0] + 1))
    code -= docs
    comments -= code

    # The syntax tree.
    counts = Counter({"lines": len(code), "comments": len(comments), "written": len(code | docs | comments)})
    for node in ast.walk(tree):
        counts["nodes"] += 1
        counts["ternaries"] += isinstance(node, ast.IfExp)
        counts["pairs"] += is_pair(node)
        counts["comprehensions"] += isinstance(node, COMPREHENSIONS)
        if isinstance(node, FUNCTIONS):
            counts["long functions"] += node.end_lineno - node.lineno >= MOST_LINES_OF_A_FUNCTION

    for number, line in enumerate(source.splitlines(), start=1):
        counts["long lines"] += len(line) > LONGEST_LINE
        counts["wide docs"] += number in docs | comments and len(line) > LONGEST_LINE_OF_DOCS
    return counts


def row(counts: Counter) -> list[str]:
    """Turn counts into the cells of a row of the table."""
    lines = max(counts["lines"], 1)
    share_of_comments = counts["comments"] / max(counts["written"], 1)
    cells = [f"{counts['lines']:,}", f"{counts['nodes'] / lines:.1f}"]
    cells += [f"{1000 * counts[name] / lines:.0f}" for name in COLUMNS[2:5]]
    cells.append(f"{100 * share_of_comments:.1f} %")
    cells += [str(counts[name]) for name in COLUMNS[6:]]
    return cells


def main() -> None:
    """Print the table for the paths that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="+", type=Path)
    parser.add_argument("--files", action="store_true", help="one row per file instead of one per path")
    arguments = parser.parse_args()

    # One row per path, or per file, and their sum.
    rows = {}
    total = Counter()
    for path in arguments.paths:
        for file in [path] if path.is_file() else sorted(path.rglob("*.py")):
            counts = count(file)
            total += counts
            rows.setdefault(file if arguments.files else path, Counter()).update(counts)
    rows["all"] = total

    print("".ljust(44), *COLUMNS)
    for name, counts in rows.items():
        cells = [cell.rjust(len(column)) for cell, column in zip(row(counts), COLUMNS, strict=True)]
        print(str(name).removeprefix("hydra_transformers/").ljust(44), *cells)


if __name__ == "__main__":
    main()
