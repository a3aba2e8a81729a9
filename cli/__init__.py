"""The command line. A command opens, calls one function of the library and prints.

In dependency order:

    commands   the table of commands, and their import when called
    report     errors and warnings on stderr, exit codes
    main       the group `marlin-moe`; `__main__` is the same for `python -m marlin_moe.cli`

and one module per command, named after it.
"""
