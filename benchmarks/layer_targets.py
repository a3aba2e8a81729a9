"""The figures asked for, on one H200, bf16 tokens, symmetric int4, in burst after rest.

A layer's time over its floor (`layer_problems.floor_us`), for each shape and number of tokens M; and its time
over that of the best peer in the same run. Where nothing is asked for there is no entry.
"""

from layer_problems import ALL_TOKENS

FEW = (1, 2, 4)
DECODE = (8, 16, 32, 64, 128)
PREFILL = (256, 512, 1024, 2048, 4096, 8192)

KIMI_FEW = dict(zip(FEW, (2.3, 1.9, 1.6), strict=True))
KIMI_DECODE = dict(zip(DECODE, (1.35, 1.26, 1.2, 1.2, 1.25), strict=True))

MOST_OVER_FLOOR: dict[str, dict[int, float]] = {
    "kimi-k2.5-tp8": KIMI_FEW
    | KIMI_DECODE
    | dict(zip(PREFILL, (1.28, 1.35, 1.55, 2.0, 1.7, 1.65), strict=True)),
    "kimi-k2.5-ep8": KIMI_FEW
    | KIMI_DECODE
    | dict(zip(PREFILL, (1.2, 1.25, 1.35, 1.6, 1.25, 1.35), strict=True)),
    "qwen3-30b-a3b": dict(zip(FEW, (2.8, 2.3, 1.7), strict=True))
    | dict(zip(DECODE, (1.4, 1.35, 1.3, 1.4, 1.5), strict=True))
    | dict(zip(PREFILL, (1.65, 1.9, 1.7, 1.35, 1.2, 1.25), strict=True)),
    "deepseek-v3-tp8": KIMI_FEW | KIMI_DECODE,
    "mixtral-8x7b": dict.fromkeys(DECODE, 1.4),
}
"""{shape: {M: time over floor, at most}}"""

MOST_OVER_BEST_PEER: dict[int, float] = {
    tokens: 1 / 1.2 if tokens >= 512 else 1 / 1.1 if tokens == 256 else 1.0 for tokens in ALL_TOKENS
}
"""{M: time over the best peer's, at most, for every shape}; below 1, where it is 1"""

WORST_OVER_BEST_PEER = 0.95
"""No point of the sweep is above."""

MEAN_OVER_BEST_PEER = 0.70
"""The geometric mean over the sweep, at most."""
