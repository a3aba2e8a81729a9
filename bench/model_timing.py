"""Time to first token and time per token of a transformers model, as a caller of generate() sees them.

    generate()   |prompt|--- time to first token ---|token|-- time per token --|token|-- …

Beside that the same step as a CUDA graph over a static cache: what is left where the host costs nothing.
"""

import itertools
import statistics
import time
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WARM_STEPS = 3
CACHE_MULTIPLE = 64


class Clock:
    """A streamer of generate() that notes when tokens arrive on the host; the prompt comes first."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.tokens: list[torch.Tensor] = []

    def put(self, value: torch.Tensor) -> None:
        """Called by generate() with what it has on the host now."""
        self.times.append(time.perf_counter())
        self.tokens.append(value.clone())

    def end(self) -> None:
        """Called by generate() behind the last token."""


def random_prompts(model: "PreTrainedModel", batch: int, tokens: int) -> torch.Tensor:
    """int64 [batch, tokens] on the model's device, always the same."""
    vocabulary = model.get_input_embeddings().weight.shape[0]
    generator = torch.Generator().manual_seed(tokens)
    return torch.randint(vocabulary, (batch, tokens), generator=generator).to(model.device)


def generate_timed(
    model: "PreTrainedModel", prompts: torch.Tensor, steps: int
) -> tuple[float, list[float], torch.Tensor]:
    """(ms to the first token, ms of each later one, the greedy tokens [batch, steps]) of one generate()."""
    clock = Clock()
    if prompts.device.type == "cuda":
        torch.cuda.synchronize(prompts.device)
    start = time.perf_counter()
    model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=steps,
        min_new_tokens=steps,
        do_sample=False,
        pad_token_id=0,
        streamer=clock,
    )
    times = clock.times[1:]  # behind the prompt
    later = [1e3 * (end - begin) for begin, end in itertools.pairwise(times)]
    return 1e3 * (times[0] - start), later, torch.stack(clock.tokens[1:], dim=1)


def ttft_ms(model: "PreTrainedModel", tokens: int, repeats: int) -> float:
    """Median milliseconds to the first token of one prompt, after a run that is not counted."""
    prompts = random_prompts(model, 1, tokens)
    runs = [generate_timed(model, prompts, 1)[0] for _ in range(repeats + 1)]
    return statistics.median(runs[1:])


def token_ms(model: "PreTrainedModel", batch: int, context: int, steps: int) -> tuple[float, torch.Tensor]:
    """(median milliseconds a step of generate() behind prompts of `context` tokens, the tokens)."""
    prompts = random_prompts(model, batch, context)
    generate_timed(model, prompts, WARM_STEPS)
    _, later, tokens = generate_timed(model, prompts, steps + 1)
    return statistics.median(later), tokens


class StaticDecode:
    """Greedy decoding over a static cache, in tensors that never move: a step can be captured."""

    def __init__(self, model: "PreTrainedModel", prompts: torch.Tensor, steps: int) -> None:
        from transformers import StaticCache

        length = prompts.shape[1] + steps
        length += -length % CACHE_MULTIPLE
        self.model = model
        self.cache = StaticCache(config=model.config.get_text_config(decoder=True), max_cache_len=length)
        self.token = self._next(prompts).clone()  # [batch, 1]

    @torch.no_grad()
    def _next(self, ids: torch.Tensor) -> torch.Tensor:
        out = self.model(ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        chosen: torch.Tensor = out.logits[:, -1:].argmax(-1)
        return chosen

    def step(self) -> None:
        """The next token of every sequence into `token`."""
        self.token.copy_(self._next(self.token))


def graph_token_ms(model: "PreTrainedModel", batch: int, context: int, steps: int) -> float:
    """Milliseconds a step of a replayed CUDA graph, from the device's own clock."""
    decode = StaticDecode(model, random_prompts(model, batch, context), 2 * WARM_STEPS + steps)
    for _ in range(WARM_STEPS):  # on this stream: another one would get a workspace of its own
        decode.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decode.step()
    for _ in range(WARM_STEPS):
        graph.replay()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(steps):
        graph.replay()
    end.record()
    end.synchronize()
    total_ms: float = start.elapsed_time(end)
    return total_ms / steps
