"""Checks of what Python's types leave open: `check_type`, and the values of index tensors."""

import torch

from .errors import LayerError


def check_type(name: str, value: object, *kinds: type, optional: bool = False) -> None:
    """Raise TypeError unless `value` is of one of `kinds`, or None where `optional`; a bool is no int."""
    if optional and value is None:
        return
    if isinstance(value, kinds) and not (isinstance(value, bool) and bool not in kinds):
        return
    wanted = " or ".join(kind.__name__ for kind in kinds) + (" or None" if optional else "")
    raise TypeError(f"{name}: expected {wanted}, got {type(value).__name__} {_short(value)}.")


def has_values(tensor: torch.Tensor) -> bool:
    """Whether a tensor's values can be looked at: not on meta, not while a call is traced or captured."""
    from torch._subclasses.fake_tensor import FakeTensor

    if isinstance(tensor, FakeTensor) or tensor.is_meta or torch.compiler.is_compiling():
        return False
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def is_permutation(order: torch.Tensor) -> bool:
    """Whether every row of an integer [E, K] names each of 0 .. K-1 once."""
    size = order.shape[1]
    if order.numel() == 0:
        return True
    low, high = torch.aminmax(order)
    if int(low) < 0 or int(high) >= size:
        return False
    seen = torch.zeros(order.shape, dtype=torch.bool, device=order.device)
    return bool(seen.scatter_(1, order.long(), True).all())


def expert_indices(experts: object, num_experts: int) -> torch.Tensor:
    """int64 [n] of a list or tensor of local expert indices.

    Raises:
        TypeError: a bool or anything else that is no integer.
        LayerError: an index outside 0 .. num_experts - 1.
    """
    if isinstance(experts, (list, tuple, range)):
        for value in experts:
            check_type("experts", value, int)
        small = [value for value in experts if 0 <= value < num_experts]
        if len(small) != len(experts):
            wrong = next(value for value in experts if not 0 <= value < num_experts)
            raise _outside(wrong, num_experts)
        return torch.tensor(small, dtype=torch.int64, device="cpu")
    if not isinstance(experts, torch.Tensor):
        found = f"{type(experts).__name__} {_short(experts)}"
        raise TypeError(f"experts: expected a list or tensor of local indices, got {found}.")
    if experts.is_floating_point() or experts.is_complex() or experts.dtype == torch.bool:
        raise TypeError(f"experts: expected integers (local indices), got {experts.dtype}.")
    chosen = experts.to(torch.int64).reshape(-1)
    if chosen.numel() and has_values(chosen):
        low, high = (int(value) for value in torch.aminmax(chosen))
        if low < 0 or high >= num_experts:
            raise _outside(low if low < 0 else high, num_experts)
    return chosen


def _outside(value: int, num_experts: int) -> LayerError:
    return LayerError(f"experts: expected local indices 0 .. {num_experts - 1}, got {_short(value)}.")


def _short(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)}"
    try:
        text = repr(value)
    except ValueError:  # an int of more digits than Python prints
        text = "of too many digits"
    return text if len(text) <= 80 else f"{text[:77]}…"
