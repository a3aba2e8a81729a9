"""What a made-up checkpoint is like (CheckpointSpec), and its random integers (random_layers)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from oracle_layer import Expert, Projection

# naming → path of the experts below a layer, and the spellings of gate, up and down
NAMINGS = {
    "qwen": ("mlp.experts", ("gate_proj", "up_proj", "down_proj")),
    "mixtral": ("block_sparse_moe.experts", ("w1", "w3", "w2")),
    "feed_forward": ("feed_forward.experts", ("gate_proj", "up_proj", "down_proj")),
    "lfm2": ("feed_forward.experts", ("w1", "w3", "w2")),
}
FUSED = ("fused", "fused-nested", "fused-apart", "fused-transposed")
STORAGES = ("compressed-tensors", *FUSED, "gptq", "gptq_v2", "awq")
EXTRAS = (
    "attention",
    "quantized_attention",
    "embeddings",
    "norms",
    "router",
    "shared_experts",
    "dense_first",
    "mtp",
)
GROUPED_ORDERS = ("group", "dynamic", "true", True)  # spellings of `actorder` that come with a g_idx


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSpec:
    """Everything that decides the bytes of a checkpoint.

    storage      compressed-tensors; fused ("experts.gate_up_proj_packed" [E, 2I, H·bits/32]) or fused-nested
                 ("experts.gate_up_proj.weight_packed"), fused-apart ("experts.gate_proj_packed" and up_proj)
                 or fused-transposed ("experts.gate_up_proj_packed" [E, H·bits/32, 2I]); gptq (zero − 1
                 stored) or gptq_v2; awq
    group_size   None is one scale per column; `down_bits` and `down_group_size` (0: as the others) are w2's
    actorder     as in the config; "group", "dynamic", "true" and True write a g_idx, another in each expert
    dtype        of scales, biases and everything unquantized; `scale_dtype` overrides it for scales
    extras       tensors that are no routed experts, see EXTRAS; "dense_first" makes layer 0 a plain MLP,
                 "mtp" adds a layer with BF16 experts after the last
    shards       1 is model.safetensors; more get an index, the tensors of an expert strewn over the files
    weight_shape dtype of the weight_shape tensors, None for none
    wrapped_zeros  zero points include 2^bits, stored as 2^bits − 1 (4-bit Marlin zero points cannot hold it)
    """

    num_layers: int = 1
    num_experts: int = 4
    hidden_size: int = 128
    intermediate_size: int = 128
    bits: int = 4
    group_size: int | None = 32
    down_bits: int = 0
    down_group_size: int | None = 0
    symmetric: bool = True
    actorder: str | bool | None = None
    dtype: torch.dtype = torch.bfloat16
    scale_dtype: torch.dtype | None = None
    naming: str = "qwen"
    prefix: str = "model.layers"
    storage: str = "compressed-tensors"
    shards: int = 1
    bias: bool = False
    extras: tuple[str, ...] = ("attention", "embeddings", "norms", "router")
    weight_shape: torch.dtype | None = torch.int64
    wrapped_zeros: bool = False
    text_config: bool = False
    top_k: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise ValueError for a checkpoint that no tool could have written."""
        for name, table in (("naming", NAMINGS), ("storage", STORAGES)):
            if getattr(self, name) not in table:
                raise ValueError(f"{name} {getattr(self, name)!r}: not one of {sorted(table)}")
        if set(self.extras) - set(EXTRAS):
            raise ValueError(f"extras {sorted(set(self.extras) - set(EXTRAS))}: not among {EXTRAS}")
        if self.symmetric and self.storage == "awq":
            raise ValueError("AWQ has zero points")
        if self.storage == "awq" and (self.bits != 4 or self.down[0] != 4 or self.actorder):
            raise ValueError("AWQ has 4 bits and no order")
        if self.storage not in ("compressed-tensors", *FUSED) and self.down_bits:
            raise ValueError("GPTQ and AWQ have one number of bits")
        if self.wrapped_zeros and (self.storage != "gptq" or self.symmetric):
            raise ValueError("only asymmetric GPTQ v1 has wrapped zeros")
        if self.has_g_idx and self.storage in FUSED:
            raise ValueError("fused experts with an order: not known to exist")
        for size, (bits, group) in ((self.hidden_size, self.gate_up), (self.intermediate_size, self.down)):
            if size % 8 or (group is not None and size % group) or bits not in (4, 8):
                raise ValueError(f"{size} columns, groups of {group}, {bits} bits")
            if group is None and self.has_g_idx:
                raise ValueError("one scale per column has no order")

    @property
    def gate_up(self) -> tuple[int, int | None]:
        """Bits and group size of gate and up."""
        return self.bits, self.group_size

    @property
    def down(self) -> tuple[int, int | None]:
        """Bits and group size of down."""
        return (
            self.down_bits or self.bits,
            self.group_size if self.down_group_size == 0 else self.down_group_size,
        )

    @property
    def has_g_idx(self) -> bool:
        return self.actorder in GROUPED_ORDERS

    @property
    def moe_layers(self) -> list[int]:
        return list(range("dense_first" in self.extras, self.num_layers))

    def module(self, layer: int) -> str:
        """Name of the experts module of a layer."""
        return f"{self.prefix}.{layer}.{NAMINGS[self.naming][0]}"


class _Draw:
    """Random contents of one checkpoint, from one seed."""

    def __init__(self, spec: CheckpointSpec) -> None:
        self.spec = spec
        self.generator = torch.Generator().manual_seed(spec.seed)

    def integers(self, low: int, high: int, shape: tuple[int, ...]) -> torch.Tensor:
        """int32, low … high − 1, both ends certainly among them."""
        out = torch.randint(low, high, shape, generator=self.generator, dtype=torch.int32)
        out.view(-1)[0], out.view(-1)[-1] = low, high - 1
        return out

    def order(self, num_k: int, group_size: int) -> torch.Tensor:
        return (torch.arange(num_k) // group_size)[torch.randperm(num_k, generator=self.generator)].int()

    def projection(
        self, n: int, k: int, form: tuple[int, int | None], g_idx: torch.Tensor | None
    ) -> Projection:
        bits, group_size = form
        groups = 1 if group_size is None else k // group_size
        scales = torch.rand(n, groups, generator=self.generator) * 0.03 + 0.001
        # A stored zero of 0 − 1 does not exist in GPTQ v1, one of 2^bits − 1 means 2^bits.
        low, high = int(self.spec.storage == "gptq"), (1 << bits) + int(self.spec.wrapped_zeros)
        bias = torch.randn(n, generator=self.generator).to(self.spec.dtype) if self.spec.bias else None
        return Projection(
            values=self.integers(0, 1 << bits, (n, k)),
            scales=scales.to(self.spec.scale_dtype or self.spec.dtype),
            bits=bits,
            zero_points=None if self.spec.symmetric else self.integers(low, high, (n, groups)),
            g_idx=g_idx,
            bias=bias,
        )

    def expert(self) -> Expert:
        spec = self.spec
        h, i = spec.hidden_size, spec.intermediate_size
        (_, group), (_, down_group) = spec.gate_up, spec.down
        of_hidden = self.order(h, group) if spec.has_g_idx and group else None
        of_intermediate = self.order(i, down_group) if spec.has_g_idx and down_group else None
        return Expert(
            gate=self.projection(i, h, spec.gate_up, of_hidden),
            up=self.projection(i, h, spec.gate_up, of_hidden),
            down=self.projection(h, i, spec.down, of_intermediate),
        )


def random_layers(spec: CheckpointSpec) -> dict[str, list[Expert]]:
    """{experts module: experts} of every quantized MoE layer; equal specs give equal integers."""
    draw = _Draw(spec)
    return {spec.module(layer): [draw.expert() for _ in range(spec.num_experts)] for layer in spec.moe_layers}
