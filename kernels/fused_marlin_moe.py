"""The op: check once -> problem -> plan -> backend."""

import torch

from .activation import Activation
from .arguments import MoEArguments
from .call import ReadyCall, remembered, run_checked
from .layer import MarlinMoELayer
from .registration import is_traced, through_dispatcher


def fused_marlin_moe(
    x: torch.Tensor,
    layer: MarlinMoELayer,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    activation: str | Activation = "silu",
    apply_router_weight_on_input: bool = False,
    routed_scaling_factor: float = 1.0,
    expert_map: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """The routed experts' output for tokens x: the sum over slots of weight * w2(activation(w13(x))).

    Inference only: the result has no gradient, and an input that asks for one is refused.

    Sums are float32. Between the GEMMs the reference keeps float32 and rounds once, at the end; "cuda" and
    "triton" keep the activations, and of many tokens each slot's output, in x.dtype, as vLLM's kernels do.
    In float16 what is beyond 65504 there becomes infinite, and never clipped: a token with such an activation
    has no finite output, the others are as ever. bfloat16 has the range of float32.

    Args:
        x: bfloat16, float16 or float32 [M, H], any strides; M = 0 is fine.
        layer: the experts. More than its max_tokens tokens run in chunks.
        topk_weights: float32 or x.dtype [M, T], read as they are.
        topk_ids: int32 or int64 [M, T], global expert numbers. -1 and experts of other ranks add nothing.
            Other numbers out of range are an error on a CPU; elsewhere they add nothing.
        activation: a name, or an `Activation` with parameters.
        apply_router_weight_on_input: multiply x by the weights (in float32) instead of w2's output.
        routed_scaling_factor: multiplies the result.
        expert_map: int32 [global experts] -> local index or -1; the layer's own by default.
        out: where to write, and what is returned; a new tensor by default. Of x's dtype, shape and device,
            rows contiguous (with any gap between rows), in memory that neither an input nor the layer shares.
        backend: "cuda", "triton", "reference", or None for the first of them that accepts the call.

    Returns:
        [M, H] of x.dtype. The same call gives the same bits.

    Raises:
        TypeError: an argument of a wrong Python type.
        OpError: arguments that do not fit the layer or each other; nothing was written.
        BackendError: the backend asked for does not run this call; the text lists every backend's reason.
        WorkspaceError: no memory for the workspace, or it is smaller than one token's slots.
    """
    options = (activation, apply_router_weight_on_input, routed_scaling_factor, backend)
    if torch.compiler.is_compiling() or is_traced(x, layer):
        return through_dispatcher(x, layer, topk_weights, topk_ids, expert_map, out, options)
    if expert_map is None and isinstance(layer, MarlinMoELayer):
        expert_map = layer.expert_map
    key = None
    workspace = layer.workspace if isinstance(layer, MarlinMoELayer) and layer.device.type == "cuda" else None
    if workspace is not None and out is None and isinstance(x, torch.Tensor):
        matrices = (layer.w13, layer.w2)
        key, ready = remembered(workspace.calls, x, topk_weights, topk_ids, expert_map, options, matrices)
        if ready is not None and ready.fits(x, topk_weights):
            return ready.run(x, topk_weights, topk_ids, expert_map, workspace)
    arguments = MoEArguments(
        x=x,
        layer=layer,
        topk_weights=topk_weights,
        topk_ids=topk_ids,
        activation=Activation.parse(activation),
        apply_router_weight_on_input=apply_router_weight_on_input,
        routed_scaling_factor=routed_scaling_factor,
        expert_map=expert_map,
        out=out,
    )
    result = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    chosen = run_checked(arguments, result, backend)
    if key is not None and chosen == "cuda":
        ReadyCall.remember(arguments, result, key)
    return result
