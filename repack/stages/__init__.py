"""The stages of the pipeline, one file each, in the order in which they run.

gather                per-expert tensors to stacked w13 = [gate; up] and w2, checkpoint layout
order                 act-order: K sorted by group
shard                 this rank's experts and slice of the intermediate size
pad                   the intermediate size up to a multiple of 64
repack_weights        packed words to Marlin tiles
permute_scales        scales to Marlin order
permute_zero_points   zero points to Marlin zero points
permute_bias          bias to Marlin order
attach_workspace      the layer gets its persistent workspace
"""
