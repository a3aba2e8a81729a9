"""Overlapping memory against the sets of bytes themselves."""

import itertools

import torch

from marlin_moe.kernels.overlap import first_overlap

BUFFER = torch.zeros(24, dtype=torch.int16)


def views() -> list[torch.Tensor]:
    """Matrices, rows of other strides, vectors and boxes in one small buffer."""
    words = BUFFER.view(torch.int32)  # the buffer in elements of another size
    made = [BUFFER[start:stop] for start, stop in ((0, 1), (0, 24), (3, 9), (9, 12), (12, 12))]
    made += [words[1:5], words.as_strided((3, 1), (3, 1), 2), BUFFER.view(2, 3, 4)[:, 1:2]]
    for rows, columns, row, column, start in itertools.product((1, 3), (1, 2), (0, 4, 6), (1, 2), (0, 2, 5)):
        made.append(BUFFER.as_strided((rows, columns), (row, column), start))
    return made


def bytes_of(tensor: torch.Tensor) -> set[int]:
    places = itertools.product(*map(range, tensor.shape))
    size = tensor.element_size()
    starts = {
        (tensor.storage_offset() + sum(i * s for i, s in zip(place, tensor.stride(), strict=True))) * size
        for place in places
    }
    return {start + byte for start in starts for byte in range(size)}


def exact(tensor: torch.Tensor) -> bool:
    """What `first_overlap` promises to be exact for: contiguous, or a matrix of contiguous rows."""
    rows = tensor.dim() == 2 and (tensor.stride(1) == 1 or tensor.shape[1] == 1)
    return tensor.is_contiguous() or (rows and tensor.stride(0) >= tensor.shape[1])


def test_no_overlap_is_missed_and_none_invented_where_it_is_exact() -> None:
    counts = {True: 0, False: 0}
    for a, b in itertools.product(views(), repeat=2):
        found = first_overlap(a, [("b", b)]) == "b"
        truth = bool(bytes_of(a) & bytes_of(b))
        text = f"{tuple(a.shape)} {a.stride()} {a.storage_offset()}, {tuple(b.shape)} {b.stride()}"
        assert found or not truth, f"missed: {text} {b.storage_offset()}"
        strides = {t.stride(0) * t.element_size() for t in (a, b) if not t.is_contiguous() and t.dim() == 2}
        if exact(a) and exact(b) and len(strides) < 2:
            assert found == truth, f"invented: {text} {b.storage_offset()}"
            counts[truth] += 1
    assert min(counts.values()) > 100, counts


def test_the_first_is_named() -> None:
    others = [("none", None), ("apart", BUFFER[:3]), ("first", BUFFER[4:6]), ("second", BUFFER[5:7])]
    assert first_overlap(BUFFER[3:9], others) == "first"
    assert first_overlap(BUFFER[3:4], others) is None
    assert first_overlap(BUFFER[5:5], others) is None
