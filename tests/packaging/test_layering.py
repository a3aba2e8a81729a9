"""Who may import whom: kernels, repack, integrations, bench, cli, in this order; bare `__init__` files."""

import ast
import re
from collections.abc import Iterator
from pathlib import PurePosixPath

import pytest

from tree import ROOT, module_name, package_files

SOURCES = package_files()
MAY_NOT_IMPORT = {
    "kernels": ("marlin_moe.repack", "marlin_moe.cli", "marlin_moe.bench", "marlin_moe.integrations"),
    "repack": ("marlin_moe.cli", "marlin_moe.bench", "marlin_moe.integrations"),
    "integrations": ("marlin_moe.cli", "marlin_moe.bench"),
    "bench": ("marlin_moe.cli",),
    "cli": ("marlin_moe.integrations",),
}
ONLY_INSIDE_FUNCTIONS = ("compressed_tensors", "transformers", "triton")
ADAPTERS = {
    re.compile(r"integrations/hf_\w+\.py"): "transformers",
    re.compile(r"kernels/triton/(?!__init__)\w+\.py"): "triton",
}
"""Files that extend a library or are written in its language: whoever imports one has it already."""


def parse(path: PurePosixPath) -> ast.Module:
    return ast.parse((ROOT / path).read_text(), filename=str(path))


def imported_modules(path: PurePosixPath, nodes: Iterator[ast.AST]) -> Iterator[tuple[str, bool]]:
    """Absolute name of every module that these nodes import, and whether the import is relative."""
    package = module_name(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((alias.name, False) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            name = ".".join([*base, *(node.module or "").split(".")]).rstrip(".")
            yield name, node.level > 0
            yield from ((f"{name}.{alias.name}", node.level > 0) for alias in node.names)


def outside_functions(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that run when the module is imported."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        yield child
        yield from outside_functions(child)


@pytest.mark.parametrize("path", SOURCES, ids=str)
def test_imports_point_one_way_and_are_relative(path: PurePosixPath) -> None:
    forbidden = MAY_NOT_IMPORT.get(path.parts[0], ())
    for name, relative in imported_modules(path, ast.walk(parse(path))):
        assert not any(name == top or name.startswith(f"{top}.") for top in forbidden), name
        assert relative or name.partition(".")[0] != "marlin_moe", f"{name} is imported by its absolute name"


@pytest.mark.parametrize("path", SOURCES, ids=str)
def test_slow_libraries_are_imported_inside_functions(path: PurePosixPath) -> None:
    names = [name for name, _ in imported_modules(path, outside_functions(parse(path)))]
    for pattern, library in ADAPTERS.items():
        if pattern.fullmatch(str(path)):
            assert any(name.split(".")[0] == library for name in names), "no reason to be an adapter"
            return
    assert not [name for name in names if name.partition(".")[0] in ONLY_INSIDE_FUNCTIONS]
    own = [name for name in names if re.match(r"marlin_moe\.(integrations\.hf_|kernels\.triton(\.|$))", name)]
    assert not own, "adapters are imported inside functions too"


INIT_FILES = [path for path in SOURCES if path.name == "__init__.py" and path.parts[0] != "api"]


def children_of(init: PurePosixPath) -> dict[str, list[PurePosixPath]]:
    """{module or sub-package: its files}, for what lies beside an `__init__.py`."""
    children: dict[str, list[PurePosixPath]] = {}
    for path in SOURCES:
        if path.is_relative_to(init.parent) and path != init and path.name != "__main__.py":
            children.setdefault(path.relative_to(init.parent).parts[0].removesuffix(".py"), []).append(path)
    return children


def needs(package: str, files: list[PurePosixPath]) -> set[str]:
    """First components, below `package`, of what these files import when they are imported."""
    names = {name for path in files for name, _ in imported_modules(path, outside_functions(parse(path)))}
    return {
        name.removeprefix(f"{package}.").split(".")[0] for name in names if name.startswith(f"{package}.")
    }


@pytest.mark.parametrize("path", INIT_FILES, ids=str)
def test_init_is_a_docstring_that_lists_its_modules_in_dependency_order(path: PurePosixPath) -> None:
    tree = parse(path)
    assert len(tree.body) == 1, "transformers may import `kernels` for another package: nothing may run here"
    docstring = ast.get_docstring(tree)
    assert docstring
    children = children_of(path)
    listed = [
        name for name in re.findall(r"^\s*(\w+)(?::|\s{2,}|$)", docstring, re.MULTILINE) if name in children
    ]
    assert sorted(listed) == sorted(children), "each module once, on a line of its own: `name   what it is`"
    for position, name in enumerate(listed):
        late = needs(module_name(path), children[name]) & children.keys() - {*listed[:position], name}
        assert not late, f"{name} is listed before {sorted(late)}, which it imports"
