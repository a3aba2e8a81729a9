"""How models spell the projections of a numbered expert: a table from spelling to role.

An expert is gate, up and down: y = down(act(gate(x)) * up(x)). A model of a new name needs no line here; a
model with new projection names needs one.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Spelling:
    """The names of the three projections below an expert, and whose they are."""

    gate: str
    up: str
    down: str
    models: str

    @property
    def projections(self) -> tuple[str, str, str]:
        """(gate, up, down)."""
        return self.gate, self.up, self.down

    @property
    def roles(self) -> tuple[tuple[str, str], ...]:
        """(role, projection): what each of them is."""
        return ("gate", self.gate), ("up", self.up), ("down", self.down)


NUMBERED = (
    Spelling(
        gate="gate_proj",
        up="up_proj",
        down="down_proj",
        models="Qwen-MoE, DeepSeek, Kimi, GLM, OLMoE, Ernie, Bailing, dots1, Jamba, Llama-4, granite",
    ),
    Spelling(gate="w1", up="w3", down="w2", models="Mixtral, Phi-MoE, MiniMax, LFM2, Kimi-Linear"),
    Spelling(gate="w1", up="v1", down="w2", models="DBRX"),
    Spelling(gate="linear", up="linear_v", down="linear_1", models="Grok-1"),
)


COMMON = NUMBERED[:2]
"""Those that have no projection in common: asked one after the other where no tensors tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedSpelling:
    """How a model spells experts that are stored as one tensor per projection; gate and up fused or apart.

    Attributes:
        parts: projection name -> the roles side by side in it.
    """

    parts: tuple[tuple[str, tuple[str, ...]], ...]
    models: str

    @property
    def projections(self) -> frozenset[str]:
        """All names, which have to be there together."""
        return frozenset(name for name, _ in self.parts)

    def roles_of(self, projection: str) -> tuple[str, ...]:
        """The roles in a projection; none where it is no part of this spelling."""
        return dict(self.parts).get(projection, ())


FUSED = (
    FusedSpelling(
        parts=(("gate_up_proj", ("gate", "up")), ("down_proj", ("down",))),
        models="transformers 5's experts modules; llm-compressor's repacked experts",
    ),
    FusedSpelling(parts=(("w13_weight", ("gate", "up")), ("w2_weight", ("down",))), models="vLLM's names"),
    FusedSpelling(parts=(("w13", ("gate", "up")), ("w2", ("down",))), models="vLLM's names, short"),
    FusedSpelling(
        parts=(("gate_proj", ("gate",)), ("up_proj", ("up",)), ("down_proj", ("down",))),
        models="stacked experts of MLX and others",
    ),
    FusedSpelling(
        parts=(("w1", ("gate",)), ("w3", ("up",)), ("w2", ("down",))), models="stacked Mixtral experts"
    ),
)
