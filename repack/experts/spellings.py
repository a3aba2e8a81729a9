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


NUMBERED = (
    Spelling(
        gate="gate_proj",
        up="up_proj",
        down="down_proj",
        models="Qwen-MoE, DeepSeek, Kimi, GLM, OLMoE, Ernie, Llama-4",
    ),
    Spelling(gate="w1", up="w3", down="w2", models="Mixtral, Phi-MoE, MiniMax, LFM2, Kimi-Linear"),
)
