"""A small layer through a pipeline of the test's own."""

from __future__ import annotations

from typing import Any

from checkpoints import CheckpointSpec, make_source
from marlin_moe import MarlinMoELayer, Pipeline, QuantScheme, process_weights
from marlin_moe.repack.pipeline import STAGES

SPEC = CheckpointSpec(num_experts=2, hidden_size=64, intermediate_size=128, symmetric=False, bias=True)
PLAIN = CheckpointSpec(num_experts=2, hidden_size=64, intermediate_size=128)
MODULE = "model.layers.0.mlp.experts"
NAMES = [item.name for item in STAGES]


def load(pipeline: Pipeline | None, spec: CheckpointSpec = SPEC, **options: Any) -> MarlinMoELayer:
    source = make_source(spec)
    scheme = QuantScheme.from_config(source.config["quantization_config"], MODULE)
    return process_weights(source.expert_tensors(MODULE), scheme=scheme, pipeline=pipeline, **options)
