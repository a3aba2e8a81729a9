"""The finished layer gets its persistent workspace: registered with its device, not yet allocated."""

from ...kernels.workspace import Workspace
from ..assemble import assemble_layer
from ..stage import both, stage
from ..states import Context, State


@stage(reads=both("qweight", "scales"), writes=("workspace",), whole_layer=True)
def attach_workspace(state: State, context: Context) -> State:
    """Write `workspace`, the layer's handle on the scratch of its device."""
    return state.evolve(workspace=Workspace.attach(assemble_layer(state, context)))
