"""Where the routed experts of a checkpoint are. Modules in dependency order.

spellings     how models call the projections of an expert: a table from spelling to role
fused         experts stored as one 3-D tensor per projection, and views of them as numbered ones
find          the experts modules of a checkpoint, found by their tensors
fused_source  reads those views out of the 3-D tensors
"""
