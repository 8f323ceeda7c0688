"""`python -m docs_site.run_notebooks`: runs the notebooks of docs/notebooks, and keeps what their cells give.

Cells run in one process one after the other, as Jupyter runs them, but without Jupyter: what a cell prints and its last
expression become its outputs, and a figure of matplotlib becomes an SVG.
"""

import argparse
import ast
import contextlib
import io
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent.parent / "docs" / "notebooks"
QUIET = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m docs_site.run_notebooks", description="Run the notebooks again.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="of those to run (default: all)")
    options = parser.parse_args(argv)
    os.environ.update(QUIET)
    for path in sorted(FOLDER.glob("*.ipynb")):
        if not options.names or path.stem in options.names:
            notebook = json.loads(path.read_text(encoding="utf-8"))
            with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
                run_cells(notebook, path.stem)
            path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
            print(f"ran {path.name}")
    return 0


def run_cells(notebook: dict[str, Any], name: str) -> dict[str, Any]:
    """Runs the code cells of a notebook, and puts their outputs into it; returns the names that they leave."""
    names: dict[str, Any] = {"__name__": "__main__"}
    codes = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(codes, start=1):
        outputs = run_cell("".join(cell["source"]), names, f"{name}, cell {number}")
        cell["execution_count"], cell["outputs"] = number, outputs
    return names


def run_cell(source: str, names: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """Runs a cell among names; returns its outputs in the form of a notebook."""
    tree = ast.parse(source, where)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, where, "exec"), names)
        value = None if last is None else eval(compile(ast.Expression(last.value), where, "eval"), names)
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        outputs.append({"output_type": "stream", "name": "stdout", "text": _lines(printed.getvalue())})
    if value is not None:
        data = {kind: _lines(text) for kind, text in _shown(value).items()}
        outputs.append({"output_type": "display_data", "metadata": {}, "data": data})
    return outputs


def _shown(value: Any) -> dict[str, str]:
    """A value as a notebook shows it: figures as pictures, described by their title."""
    if not hasattr(value, "savefig"):
        return {"text/plain": repr(value)}
    import matplotlib

    picture = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "lowtide", "svg.fonttype": "none"}):
        value.savefig(picture, format="svg", metadata={"Date": None}, bbox_inches="tight")
    title = value.axes[0].get_title() or "what the cell draws"
    return {"text/plain": title, "image/svg+xml": picture.getvalue()}


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


if __name__ == "__main__":
    sys.exit(main())
