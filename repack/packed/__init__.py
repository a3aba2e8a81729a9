"""The packed checkpoint, version 1: a directory that holds the experts in the Marlin layout and stands alone.

In dependency order:

    names           files and tensors of a packed checkpoint, and how one is recognised
    durable         files that are whole or absent: allocated, written by position, synced, renamed
    decode          JSON values -> dataclasses, each of the declared type
    records         what the manifest says of a file, a tensor, a layer
    source          the source's fingerprint, and all that unpacking needs of its files
    manifest        `marlin_moe.json`
    run_lock        the lock that keeps a second run out of a directory
    journal         the folder of a run in progress: its lock, its partial and its finished files
    tensor_writer   a safetensors file of known shapes, hashed while it is written
    block_memory    a block's results between the stages and a file
    layer_file      one MoE layer -> experts-<layer>.safetensors
    rest_files      tensors that are no routed experts -> rest-xxxxx.safetensors
    companions      the other files of the directory: configs, tokenizer, code
    source_checks   what only the source can show and the layout would lose
    integrity       files against the manifest: sizes, headers, hashes
    reader          an open packed checkpoint
    invert          Marlin tensors -> checkpoint layout
    source_tensors  the source's tensors of a layer, expert by expert
    restore         checkpoint layout -> the source's own tensors
    differences     two tensors' bytes side by side
    compare         a packed checkpoint against its source
    repack_plan     all that a repack will write, before its first byte
    cut             a rank's slice of Marlin tensors, where it is a pure cut
    load            packed checkpoint -> layers
    make_files      the files of a repack, each made by itself
    resume          what an earlier run finished, looked at again before it is kept
    already         a finished checkpoint where one is to be made
"""
