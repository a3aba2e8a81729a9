"""`python -m marlin_moe.cli` is the command `marlin-moe`."""

from .main import main

if __name__ == "__main__":
    main(prog_name="marlin-moe")
