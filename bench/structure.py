"""The structure of the code, and the limits that it keeps: sizes, private names, circles, long functions.

    python -m bench.structure [PACKAGE]

Prints, for each folder of a package, how many files it has and how long they are; then what is limited:

- files of a folder, in `bench/` and `tests/` too: at most 18;
- accesses to private names of other modules or libraries, outside of `compat/`: none. Counted are attributes
  (`other._name`, but not of `self` and its kin), imports of private names and modules, and private names as strings
  of `getattr`, `setattr` and `hasattr`. `bench/` is counted as well;
- circles of modules, with imports inside of functions and under `TYPE_CHECKING` counted: none;
- lines of a function, its decorators left out: at most 60;
- parameters of a function, `self` and `cls` left out: at most 8. So are kernels of a GPU and the constructors of
  public trainers, whose parameters are TRL's.

The exit status is 1 where a limit is broken.
"""

from __future__ import annotations

import argparse
import ast
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MOST_FILES = 18
MOST_LINES = 60
MOST_PARAMETERS = 8
COMPAT = "compat"
"""The folder that may use private names of other libraries."""
OWN = {"self", "cls", "mcs"}
PUBLIC = {"_replace", "_asdict", "_make", "_fields", "_field_defaults", "_exit"}
"""Names that Python documents, of named tuples and of `os`."""
BY_NAME = {"getattr", "setattr", "hasattr", "delattr"}
TRAINERS = "Trainer"
"""How the names of the classes end whose constructors have TRL's parameters."""
KERNEL = "triton.jit"
"""What marks a kernel of a GPU, which takes pointers, strides and constants one by one."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    """A file of Python."""

    name: str
    """With the package's, by dots."""
    path: Path
    tree: ast.Module
    lines: int

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"


def read_package(folder: Path) -> list[Module]:
    """The modules of a package, by name."""
    modules = []
    for path in sorted(folder.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        parts = [folder.name, *path.relative_to(folder).with_suffix("").parts]
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        modules.append(Module(name, path, ast.parse(text, str(path)), text.count("\n")))
    return modules


# -- sizes --------------------------------------------------------------------------------------------------------


def folder_sizes(modules: Iterable[Module]) -> dict[str, tuple[int, float]]:
    """For each folder, its files (empty ones left out) and their median lines."""
    lines: defaultdict[str, list[int]] = defaultdict(list)
    for module in modules:
        folder = module.name if module.is_package else module.name.rpartition(".")[0]
        if module.lines:
            lines[folder].append(module.lines)
    return {folder: (len(each), statistics.median(each)) for folder, each in sorted(lines.items())}


def full_folders(root: Path) -> list[str]:
    """The folders that have too many files, empty ones counted, a line each."""
    files = Counter(path.parent for path in root.rglob("*.py"))
    return [f"{folder}: {count} files" for folder, count in sorted(files.items()) if count > MOST_FILES]


# -- private names ------------------------------------------------------------------------------------------------


def private_accesses(module: Module) -> list[str]:
    """Where a module uses private names of others, a line each; those of `compat/` may."""
    if COMPAT in module.name.split("."):
        return []
    return [f"{module.path}:{line}: {name}" for line, name in sorted(_private_names(module.tree))]


def _private_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            if _is_private(node.attr) and not _is_own(node.value):
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.ImportFrom):
            names = [*(node.module or "").split("."), *(each.name for each in node.names)]
            yield from ((node.lineno, f"import of {name}") for name in names if _is_private(name))
        elif isinstance(node, ast.Import):
            parts = [part for each in node.names for part in each.name.split(".")]
            yield from ((node.lineno, f"import of {name}") for name in parts if _is_private(name))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in BY_NAME:
            name = node.args[1] if len(node.args) > 1 else None
            if isinstance(name, ast.Constant) and _is_private(str(name.value)) and not _is_own(node.args[0]):
                yield node.lineno, ast.unparse(node)


def _is_private(name: str) -> bool:
    return (
        name.startswith("_")
        and name not in PUBLIC
        and not (name.startswith("__") and name.endswith("__"))
        and name.strip("_") != ""
    )


def _is_own(value: ast.expr) -> bool:
    """Whether an attribute is of the object itself, its class or its base's part."""
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name):
        return value.func.id == "super" or (value.func.id == "type" and _is_own(value.args[0]))
    return isinstance(value, ast.Name) and value.id in OWN


# -- circles ------------------------------------------------------------------------------------------------------


def imports_of(modules: Iterable[Module]) -> dict[str, set[str]]:
    """The modules of the package that each imports: as it is loaded, inside of functions, or for types alone."""
    known = {module.name: module for module in modules}
    found: dict[str, set[str]] = {}
    for module in known.values():
        targets = {name for node in ast.walk(module.tree) for name in _imported(node, module, known)}
        found[module.name] = targets - {module.name}
    return found


def _imported(node: ast.AST, module: Module, known: Mapping[str, Module]) -> Iterator[str]:
    """The modules that one statement names; a package's own `__init__` only where a name is of none below it."""
    if isinstance(node, ast.Import):
        yield from (each.name for each in node.names if each.name in known)
    if not isinstance(node, ast.ImportFrom):
        return
    parts = module.name.split(".") if module.is_package else module.name.split(".")[:-1]
    base = (
        ".".join([*parts[: len(parts) - node.level + 1], *filter(None, [node.module])]) if node.level else node.module
    )
    for each in node.names:
        inner = f"{base}.{each.name}"
        if inner in known:
            yield inner
        elif base in known:
            yield str(base)


def circles(imports: Mapping[str, set[str]]) -> list[list[str]]:
    """Groups of modules of which each one reaches every other (Tarjan 1972), each in order of names."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        order[name] = lowest[name] = len(order)
        stack.append(name)
        for target in sorted(imports.get(name, ())):
            if target not in order:
                visit(target)
                lowest[name] = min(lowest[name], lowest[target])
            elif target in stack:
                lowest[name] = min(lowest[name], order[target])
        if lowest[name] == order[name]:
            at = stack.index(name)
            group = stack[at:]
            del stack[at:]
            if len(group) > 1:
                found.append(sorted(group))

    for name in sorted(imports):
        if name not in order:
            visit(name)
    return found


# -- functions ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Size:
    """A function."""

    where: str
    lines: int
    parameters: int
    limited: bool
    """Whether its parameters are ours to choose."""


def function_sizes(module: Module) -> Iterator[Size]:
    """Every function of a module, those inside of classes and functions included."""
    for parent in ast.walk(module.tree):
        for node in ast.iter_child_nodes(parent):
            if isinstance(node, Function):
                yield Size(f"{module.path}:{node.lineno}: {node.name}", *_size_of(node, parent))


def _size_of(node: Function, parent: ast.AST) -> tuple[int, int, bool]:
    of_trainer = node.name == "__init__" and isinstance(parent, ast.ClassDef) and parent.name.endswith(TRAINERS)
    named = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    starred = [each for each in (node.args.vararg, node.args.kwarg) if each is not None]
    count = len([each for each in [*named, *starred] if each.arg not in OWN])
    on_device = any(ast.unparse(each) == KERNEL for each in node.decorator_list)
    return (node.end_lineno or node.lineno) - node.lineno + 1, count, not (of_trainer or on_device)


# -- the report ---------------------------------------------------------------------------------------------------


def report(package: Path, *others: Path, tests: Path | None = None) -> tuple[str, list[str]]:
    """The figures of a package as text, and what breaks a limit, a line each.

    Args:
        package: its folder.
        others: folders of which private accesses and numbers of files alone are looked at.
        tests: a folder of which numbers of files alone are.
    """
    modules = read_package(package)
    full = [line for folder in (package, *others, tests) if folder for line in full_folders(folder)]
    private = [
        line for folder in (package, *others) for each in read_package(folder) for line in private_accesses(each)
    ]
    rings = circles(imports_of(modules))
    sizes = [size for module in modules for size in function_sizes(module)]
    long = [f"{size.where}: {size.lines} lines" for size in sizes if size.lines > MOST_LINES]
    wide = [
        f"{size.where}: {size.parameters} parameters"
        for size in sizes
        if size.parameters > MOST_PARAMETERS and size.limited
    ]
    lines = ["folder: files, median lines"]
    lines += [f"  {folder}: {files}, {median:.0f}" for folder, (files, median) in folder_sizes(modules).items()]
    lines += [
        f"folders of more than {MOST_FILES} files: {len(full)} (at most 0)",
        f"private accesses across modules: {len(private)} (at most 0)",
        f"circles: {len(rings)} (at most 0)",
        f"longest function: {max((size.lines for size in sizes), default=0)} lines (at most {MOST_LINES})",
        f"longest signature: {max((size.parameters for size in sizes if size.limited), default=0)} parameters "
        f"(at most {MOST_PARAMETERS})",
    ]
    return "\n".join(lines), [*full, *private, *(f"circle: {' <-> '.join(ring)}" for ring in rings), *long, *wide]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "package", nargs="?", type=Path, help="the folder of a package (default: src/lowtide, and bench)"
    )
    package = parser.parse_args(argv).package
    text, broken = (
        report(package) if package else report(ROOT / "src" / "lowtide", ROOT / "bench", tests=ROOT / "tests")
    )
    print(text)
    for line in broken:
        print(line.replace(f"{ROOT}/", ""))
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
