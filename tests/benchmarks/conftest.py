"""The benchmarks are scripts beside each other; their folder is where they find each other."""

import sys

from tree import ROOT

sys.path.append(str(ROOT / "benchmarks"))
