"""Quantized Mixture-of-Experts checkpoints in the Marlin layout, and the fused op that runs them.

    layers = marlin_moe.load_layers("path/to/checkpoint")
    y = marlin_moe.fused_marlin_moe(x, layers["model.layers.0.mlp.experts"], topk_weights, topk_ids)

`_HOMES` says where every public name lives. A name is imported on its first use, so `import marlin_moe` and
`marlin-moe --help` bring no torch. Type checkers read the same names as imports; a test compares the two.
"""

from typing import TYPE_CHECKING

_HOMES = {
    # the op, its input and its scratch
    "fused_marlin_moe": ".kernels.fused_marlin_moe",
    "MarlinMoELayer": ".kernels.layer",
    "MarlinMatrix": ".kernels.layer",
    "QuantFormat": ".kernels.layer",
    "Shard": ".kernels.layer",
    "Activation": ".kernels.activation",
    "Workspace": ".kernels.workspace",
    "WorkspacePlan": ".kernels.workspace",
    "reserve": ".kernels.workspace",
    "MarlinMoEError": ".kernels.errors",
    "MarlinMoEWarning": ".kernels.errors",
    # from a checkpoint to a layer
    "load_layers": ".repack.load",
    "process_weights": ".repack.process",
    "update_weights_": ".repack.process",
    "ExpertTensors": ".repack.states",
    "QuantScheme": ".repack.scheme",
    "Pipeline": ".repack.pipeline",
    "Stage": ".repack.pipeline",
    "stage": ".repack.pipeline",
    "State": ".repack.pipeline",
    "Context": ".repack.pipeline",
    # packed checkpoints
    "repack_checkpoint": ".repack.store",
    "unpack_checkpoint": ".repack.unpack",
    "verify_checkpoint": ".repack.verify",
    "inspect_checkpoint": ".repack.inspect",
}

__all__ = list(_HOMES)

if TYPE_CHECKING:
    from .kernels.activation import Activation as Activation
    from .kernels.errors import MarlinMoEError as MarlinMoEError
    from .kernels.errors import MarlinMoEWarning as MarlinMoEWarning
    from .kernels.fused_marlin_moe import fused_marlin_moe as fused_marlin_moe
    from .kernels.layer import MarlinMatrix as MarlinMatrix
    from .kernels.layer import MarlinMoELayer as MarlinMoELayer
    from .kernels.layer import QuantFormat as QuantFormat
    from .kernels.layer import Shard as Shard
    from .kernels.workspace import Workspace as Workspace
    from .kernels.workspace import WorkspacePlan as WorkspacePlan
    from .kernels.workspace import reserve as reserve
    from .repack.inspect import inspect_checkpoint as inspect_checkpoint
    from .repack.load import load_layers as load_layers
    from .repack.pipeline import Context as Context
    from .repack.pipeline import Pipeline as Pipeline
    from .repack.pipeline import Stage as Stage
    from .repack.pipeline import State as State
    from .repack.pipeline import stage as stage
    from .repack.process import process_weights as process_weights
    from .repack.process import update_weights_ as update_weights_
    from .repack.scheme import QuantScheme as QuantScheme
    from .repack.states import ExpertTensors as ExpertTensors
    from .repack.store import repack_checkpoint as repack_checkpoint
    from .repack.unpack import unpack_checkpoint as unpack_checkpoint
    from .repack.verify import verify_checkpoint as verify_checkpoint

    __version__: str
else:

    def __getattr__(name):
        """The public name, imported on its first use; `__version__` from the installed distribution."""
        if name == "__version__":
            from importlib.metadata import version

            value = version("marlin-moe")
        elif name in _HOMES:
            from importlib import import_module

            value = getattr(import_module(_HOMES[name], __name__), name)
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value
        return value

    def __dir__():
        return sorted({*globals(), *__all__, "__version__"})
