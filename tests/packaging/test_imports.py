"""What importing costs and touches, each tried in a fresh interpreter started at the root of the checkout."""

import time

import pytest

from tree import module_name, package_files, run_python

OURS = ("kernels", "repack", "cli", "api", "bench", "integrations", "tests", "tools")
HEAVY = ("torch", "numpy", "compressed_tensors", "transformers", "rich")
UNWANTED = (
    "compressed_tensors",
    "transformers",
    "torch.utils.cpp_extension",
    "triton.compiler",
    "cuda.bindings.nvrtc",
)


def imported_by(code: str) -> set[str]:
    """Top-level names in sys.modules after the code ran, also when it ends by SystemExit."""
    program = f"""
import sys
try:
    {code}
except SystemExit as end:
    assert not end.code, end.code
print("", *sorted({{name.partition(".")[0] for name in sys.modules}}), sep="\\n")
"""
    result = run_python("-c", program)
    assert result.returncode == 0, result.stderr
    return set(result.stdout.splitlines())


@pytest.mark.parametrize(
    "code",
    [
        "import marlin_moe",
        "import marlin_moe.kernels, marlin_moe.repack, marlin_moe.cli",
        "from marlin_moe import MarlinMoEError",
        "from marlin_moe.cli.main import main; main(['--help'])",
        "from marlin_moe.cli.main import main; main(['--version'])",
        "from marlin_moe.cli.main import main; main(['repack', '--help'])",
    ],
)
def test_light_imports_bring_no_torch(code: str) -> None:
    names = imported_by(code)
    assert "marlin_moe" in names
    assert names.isdisjoint(HEAVY), names.intersection(HEAVY)


def test_help_takes_less_than_half_a_second() -> None:
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        result = run_python("-m", "marlin_moe.cli", "--help")
        seconds.append(time.perf_counter() - start)
        assert result.returncode == 0, result.stderr
    assert min(seconds) < 0.5, seconds


def test_importing_every_module_touches_no_device_and_compiles_nothing() -> None:
    paths = [path for path in package_files() if path.name != "__main__.py"]
    modules = [
        module_name(path)
        for path in paths
        if not path.name.startswith("hf_") and path.parent.name != "triton"  # they extend what they import
    ]
    assert len(modules) > 10
    program = f"""
import importlib, subprocess, sys
import torch

def refuse(*arguments, **options):
    raise RuntimeError(f"an import called this: {{arguments}}")

torch.cuda._lazy_init = refuse
torch.cuda.is_available = torch.cuda.device_count = refuse
subprocess.Popen = refuse
for name in {modules!r}:
    try:
        importlib.import_module(name)
    except Exception as error:
        sys.exit(f"{{name}}: {{error!r}}")
assert not torch.cuda.is_initialized()
print(*(name for name in {UNWANTED!r} if name in sys.modules))
"""
    result = run_python("-c", program)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == []


def test_compressed_tensors_does_not_take_our_folders_for_other_packages() -> None:
    """It imports transformers, which imports `kernels` if it finds one; at the root it would find ours."""
    program = f"""
import sys
import compressed_tensors
for name, module in sorted(sys.modules.items()):
    if name.partition(".")[0] in {OURS}:
        print(name, getattr(module, "__file__", None))
"""
    result = run_python("-c", program)
    assert result.returncode == 0, result.stderr
    assert result.stdout == ""
