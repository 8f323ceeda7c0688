"""A docstring in Google's form as Markdown: its sections become lists."""

import re

SECTIONS = ("Args", "Returns", "Raises", "Yields", "Attributes", "Example", "Examples")
HEADED = re.compile(rf"^({'|'.join(SECTIONS)}):\s*$")
NAMED = re.compile(r"^(\*{0,2}[\w.]+)(?: \(([^)]*)\))?:\s*(.*)$")


def markdown_of(docstring: str) -> str:
    """Returns a docstring, whose indentation is already removed, as Markdown."""
    lines, parts = docstring.splitlines(), []
    text: list[str] = []
    while lines:
        line = lines.pop(0)
        headed = HEADED.match(line)
        if not headed:
            text.append(line)
            continue
        block = []
        while lines and (not lines[0].strip() or lines[0].startswith(" ")):
            block.append(lines.pop(0))
        parts += ["\n".join(text).strip(), f"**{headed.group(1)}**", items(block)]
        text = []
    parts.append("\n".join(text).strip())
    return "\n\n".join(part for part in parts if part)


def items(block: list[str]) -> str:
    """Returns the lines below a section's name as a list, or as a paragraph where they name nothing."""
    lines = [line for line in block if line.strip()]
    if not lines:
        return ""
    indent = min(len(line) - len(line.lstrip()) for line in lines)
    found: list[str] = []
    for line in (line[indent:] for line in lines):
        named = NAMED.match(line)
        if named:
            kind = f" ({named.group(2)})" if named.group(2) else ""
            found.append(f"- `{named.group(1)}`{kind}: {named.group(3)}")
        elif found:
            found[-1] += f" {line.strip()}"
        else:
            found.append(line.strip())
    return "\n".join(found)
