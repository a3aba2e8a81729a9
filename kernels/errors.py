"""Errors of the op and its layer; `repack.errors` derives its own from `MarlinMoEError`.

Every message reads: tensor or key, what was expected and why, what was found, what to do.
"""


class MarlinMoEError(Exception):
    """Anything that a user of the library can cause and can mend."""


class MarlinMoEWarning(UserWarning):
    """Something was converted, skipped or is slow; said once per kind."""


class LayoutError(MarlinMoEError, ValueError):
    """A tensor cannot be brought into the Marlin layout, or out of it."""


class LayerError(MarlinMoEError, ValueError):
    """The tensors or facts of a layer do not fit together."""


class OpError(MarlinMoEError, ValueError):
    """An argument of the op does not fit the layer or the other arguments."""


class WorkspaceError(MarlinMoEError, RuntimeError):
    """A workspace cannot be planned, allocated or used."""


class BackendError(MarlinMoEError, RuntimeError):
    """No backend accepts a problem, or the one asked for does not."""


class JitError(MarlinMoEError, RuntimeError):
    """A kernel cannot be compiled, or may not be, or the cubin cache cannot be trusted."""


class DriverError(MarlinMoEError, RuntimeError):
    """The CUDA driver refused to load or launch a kernel."""
