"""What pyproject.toml cannot say: which folder becomes which package, and the optional C extension.

The folders at the root are named after their content; `api` is the package `marlin_moe` itself. A folder that
does not exist yet is left out, and sub-packages are searched for, so that none is forgotten in a wheel.
"""

from pathlib import Path

from setuptools import Extension, find_packages, setup

ROOT = Path(__file__).parent
FOLDERS = {"marlin_moe": "api"} | {
    f"marlin_moe.{folder}": folder
    for folder in ("repack", "kernels", "cli", "bench", "integrations")
    if (ROOT / folder / "__init__.py").is_file()
}
PACKAGES = [
    name
    for package, folder in FOLDERS.items()
    for name in (package, *(f"{package}.{sub}" for sub in find_packages(str(ROOT / folder))))
]
NATIVE_SOURCES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "repack" / "native").glob("*.c"))
NATIVE_HEADERS = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "repack" / "native").glob("*.h"))

EXTENSIONS = [
    Extension(
        "marlin_moe.repack.native._native",
        sources=NATIVE_SOURCES,
        depends=NATIVE_HEADERS,
        define_macros=[("Py_LIMITED_API", "0x030B0000")],  # one binary for Python 3.11 and later
        extra_compile_args=["-O3", "-std=c11", "-pthread"],
        extra_link_args=["-pthread"],
        py_limited_api=True,
        optional=True,  # without a compiler the torch path gives the same bytes, and `doctor` says so
    )
]

setup(
    package_dir=FOLDERS,
    packages=PACKAGES,
    package_data={"": ["**/*.cu", "**/*.cuh", "**/*.h", "**/*.c"], "marlin_moe": ["py.typed"]},
    ext_modules=EXTENSIONS if NATIVE_SOURCES else [],
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if NATIVE_SOURCES else {},
)
