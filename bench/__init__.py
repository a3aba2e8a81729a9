"""Measuring: what `marlin-moe bench model` calls, and benchmarks share. Modules in dependency order.

zeroed_workspace    a workspace that is new and zeroed in every call
random_checkpoint   a source checkpoint with random weights, in a real model's shapes
model_results       what a run found, as a file
model_variants      the ways in which a model's experts are run side by side
model_timing        time to first token, time per token
model_bench         the run: every variant at every point
model_plot          draws it
"""
