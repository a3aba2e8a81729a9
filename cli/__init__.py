"""The command line. A command opens, calls one function of the library and prints.

What commands share, in dependency order:

    commands   the table of commands, and their import when called
    report     errors and warnings on stderr, exit codes
    main       the group `marlin-moe`; `__main__` is the same for `python -m marlin_moe.cli`
    output     reports as JSON, tables, quantities
    progress   how far a run is, on stderr
    options    options that several commands have

One module per command, named after it, with what only that command needs before it:

    inspect           the layers of a checkpoint, and what would become of them
    repack            source to packed checkpoint
    verify            the proof that they are equal
    unpack            packed checkpoint to source
    kernels           kernels compiled ahead for a checkpoint
    bench_results     what a layer benchmark found, as a file
    bench_plot        draws it
    bench_model       prints what a model benchmark found
    bench             measures, draws, prints
    kernel_setup      where CUDA kernels are kept, and whether they may be compiled
    machine           what this machine can run, as a report
    doctor            prints it
    demo_checkpoint   the demo's checkpoint, by compressed-tensors' own code
    demo_call         a call of the op, and float64 arithmetic to compare with
    demo_proof        the demo's steps
    demo              prints them
"""
