"""One MoE layer -> `experts-<layer>.safetensors`: a `Destination` for blocks of experts that is a file."""

import math
from collections.abc import Mapping

import torch

from ..blocks import TensorSpec
from ..progress import Progress
from ..tensor_file import DTYPE_NAMES, tensor_bytes
from .block_memory import BlockMemory
from .journal import Journal
from .names import tensor_name
from .records import TensorFileRecord
from .tensor_writer import FilePlan, TensorWriter, plan_file


def plan_layer_file(name: str, module: str, specs: Mapping[str, TensorSpec]) -> FilePlan:
    """The file of a layer whose finished state has the fields `specs`, widest items first."""
    ordered = sorted(specs.items(), key=lambda item: -item[1].dtype.itemsize)  # stable: items stay aligned
    tensors = {
        tensor_name(module, field): (DTYPE_NAMES[s.dtype], s.shape, math.prod(s.shape) * s.dtype.itemsize)
        for field, s in ordered
    }
    return plan_file(name, tensors)


class LayerFile:
    """`Destination` in a file: blocks of results from reused memory to their places.

    The experts are the first dimension of every tensor, so a block is one stretch of each.
    """

    def __init__(
        self, journal: Journal, plan: FilePlan, module: str, *, device: torch.device, progress: Progress
    ) -> None:
        self.plan = plan
        self.module = module
        self._journal, self._device, self._progress = journal, device, progress
        self._writer: TensorWriter | None = None
        self._results: BlockMemory | None = None
        self._taken: Mapping[str, torch.Tensor] = {}

    def allocate(self, specs: Mapping[str, TensorSpec]) -> None:
        """The whole file's room on the disk."""
        self._writer = TensorWriter(self._journal, self.plan)
        self._results = BlockMemory(specs, self._device, self._write)

    def block(self, start: int, stop: int) -> Mapping[str, torch.Tensor]:
        """Memory for a block; that of an earlier one, where it is large enough."""
        self._taken = self.results.take(stop - start)
        return self._taken

    def commit(self, start: int, stop: int) -> None:
        """The block's results into the file."""
        self.results.commit(stop - start)
        self._progress.advance(sum(tensor.nbytes for tensor in self._taken.values()), self.plan.name)

    def _write(self, results: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in results.items():
            self.writer.append(tensor_name(self.module, name), tensor_bytes(tensor))

    @property
    def writer(self) -> TensorWriter:
        """The open file; there is one after `allocate`."""
        if self._writer is None:
            raise RuntimeError("LayerFile: allocate comes before block and commit")
        return self._writer

    @property
    def results(self) -> BlockMemory:
        """The blocks' memory; there is some after `allocate`."""
        if self._results is None:
            raise RuntimeError("LayerFile: allocate comes before block and commit")
        return self._results

    def finish(self) -> TensorFileRecord:
        """Everything synced; the file's record."""
        self.results.drain()
        self._progress.advance(len(self.plan.header), self.plan.name)
        return self.writer.finish()

    def __enter__(self) -> "LayerFile":
        return self

    def __exit__(self, *_: object) -> None:
        if self._results is not None:
            self._results.close()
            self._results = None  # it knows this file: together they would stay until the collector comes
        if self._writer is not None:
            self._writer.__exit__(None, None, None)
