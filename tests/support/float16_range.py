"""A call in float16 whose activations leave that type's range at every second token; its output would not."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from moe_cases import CaseLayer, DenseMoE, MoECall, MoECase, check, make_call, make_layer

LARGEST = 65504
CASE = MoECase(
    tokens=8,
    top_k=2,
    num_experts=3,
    hidden_size=128,
    padded_intermediate_size=128,
    dtype=torch.float16,
    scaling=2**-6,
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RangeCall:
    """The layer, the call and the float64 answer; `beyond` bool [M] says which tokens leave the range."""

    made: CaseLayer
    call: MoECall
    want: torch.Tensor
    beyond: torch.Tensor

    def check_kept(self, got: torch.Tensor) -> None:
        """Activations are float32: every token is right."""
        check(CASE, self.call, got, self.want)

    def check_infinite(self, got: torch.Tensor) -> None:
        """Activations are float16: tokens beyond the range have no finite value, the others are right."""
        assert not got[self.beyond].isfinite().any(), got[self.beyond]
        within = replace(self.call, x=self.call.x[~self.beyond])
        check(CASE, within, got[~self.beyond], self.want[~self.beyond])


def range_call(device: torch.device | str = "cpu") -> RangeCall:
    """The call on a device."""
    made = make_layer(CASE, device)
    call = make_call(CASE, made.layer)
    call.x[1::2] *= 300
    w13, _ = made.layer.dequantize()
    gate, up = (w13[call.ids].double() @ call.x.double()[:, None, :, None]).chunk(2, 2)  # [M, T, I, 1]
    largest = call.options["activation"].apply(gate, up).abs().amax((1, 2, 3))
    beyond = largest > LARGEST
    assert beyond.tolist() == [False, True] * 4
    assert (largest[~beyond] < LARGEST / 2).all()
    want = DenseMoE(made)(call)
    assert want.abs().max() < LARGEST / 2
    return RangeCall(made=made, call=call, want=want, beyond=beyond)
