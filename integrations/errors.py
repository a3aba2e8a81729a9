"""Errors of running a checkpoint in another library's model."""

from ..kernels.errors import MarlinMoEError


class ModelError(MarlinMoEError, ValueError):
    """A model that its checkpoint does not fill, or whose experts the op cannot stand for."""
