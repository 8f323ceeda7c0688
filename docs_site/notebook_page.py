"""A notebook as a page: its Markdown, its code, and what the code gave when it was last run."""

import base64
import json
from pathlib import Path
from typing import Any

IMAGES = {"image/svg+xml": "svg", "image/png": "png"}


def notebook_page(path: Path) -> tuple[str, dict[str, bytes]]:
    """Returns the Markdown of a notebook, and its pictures by the names that the Markdown has for them."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    parts, pictures = [], {}
    for number, cell in enumerate(cells):
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
        elif source.strip():
            parts.append(f"```python\n{source}\n```")
            for output in cell["outputs"]:
                parts += _shown(output, f"{path.stem}-{number}", pictures)
    note = f"*This page is the notebook [{path.name}]({path.name}), with what its code printed.*"
    parts.insert(1, note)
    return "\n\n".join(parts) + "\n", pictures


def _shown(output: dict[str, Any], name: str, pictures: dict[str, bytes]) -> list[str]:
    """Returns an output as Markdown; pictures are put beside it."""
    data = output.get("data", {"text/plain": output.get("text", "")})
    for kind, ending in IMAGES.items():
        if kind in data:
            text = "".join(data[kind])
            pictures[f"{name}.{ending}"] = text.encode() if ending == "svg" else base64.b64decode(text)
            described = "".join(data.get("text/plain", "what the cell draws"))
            return [f"![{described}]({name}.{ending})"]
    text = "".join(data.get("text/plain", "")).rstrip()
    return [f"```text\n{text}\n```"] if text else []
