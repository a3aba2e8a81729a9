"""Where the routed experts of a checkpoint are. Modules in dependency order.

spellings   how models call the projections of an expert: a table from spelling to role
find        the experts modules of a checkpoint, found by their tensors
"""
