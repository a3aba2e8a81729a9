"""`marlin_moe` itself: one table of public names, read the same by Python, by type checkers and by `dir`."""

import ast
import tomllib

import pytest

import marlin_moe
from tree import ROOT


def type_checking_imports() -> dict[str, str]:
    """{name: module} of the imports under `if TYPE_CHECKING:` in api/__init__.py."""
    tree = ast.parse((ROOT / "api" / "__init__.py").read_text())
    guard = next(node for node in tree.body if isinstance(node, ast.If))
    assert ast.unparse(guard.test) == "TYPE_CHECKING"
    imports = [node for node in guard.body if isinstance(node, ast.ImportFrom)]
    # `import X as X` is what re-exports a name to the type checkers of users
    assert all(alias.asname == alias.name for node in imports for alias in node.names)
    return {alias.name: "." * node.level + (node.module or "") for node in imports for alias in node.names}


def test_type_checkers_see_the_table() -> None:
    assert type_checking_imports() == marlin_moe._HOMES


@pytest.mark.parametrize("name", sorted(marlin_moe._HOMES))
def test_every_public_name_resolves(name: str) -> None:
    value = getattr(marlin_moe, name)
    assert value.__name__ == name
    assert value.__module__.startswith("marlin_moe.")
    assert value.__doc__, f"{name} is public and has no docstring"


def test_all_and_dir_list_the_table() -> None:
    assert marlin_moe.__all__ == list(marlin_moe._HOMES)
    assert {*marlin_moe.__all__, "__version__"} <= set(dir(marlin_moe))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'marlin_moe' has no attribute 'fused_marlin_mow'"):
        _ = marlin_moe.fused_marlin_mow  # type: ignore[attr-defined]


def test_version_is_the_distributions() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        assert marlin_moe.__version__ == tomllib.load(file)["project"]["version"]
