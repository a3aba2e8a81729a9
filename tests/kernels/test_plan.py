"""Plans are integers: sizes, offsets and chunks, without a tensor."""

import dataclasses
import itertools

import pytest
import torch

from marlin_moe import MarlinMoEError, WorkspacePlan
from marlin_moe.kernels.plan.buffers import MAX_ROWS, overlaid
from marlin_moe.kernels.plan.problem import LayerFacts, MatrixFacts, MoEProblem
from marlin_moe.kernels.plan.reference import plan_moe, plan_workspace
from random_layer import random_layer


def facts(
    *, num_experts: int = 12, hidden_size: int = 256, padded_intermediate_size: int = 192, gated: bool = True
) -> LayerFacts:
    def matrix(size_k: int, size_n: int) -> MatrixFacts:
        return MatrixFacts(
            size_k=size_k,
            size_n=size_n,
            bits=4,
            num_groups=2,
            zero_points=False,
            sort_order=False,
            bias=False,
        )

    return LayerFacts(
        num_experts=num_experts,
        num_global_experts=num_experts,
        gated=gated,
        w13=matrix(hidden_size, padded_intermediate_size * (2 if gated else 1)),
        w2=matrix(padded_intermediate_size, hidden_size),
        scales_dtype=torch.bfloat16,
    )


def problem(tokens: int, top_k: int) -> MoEProblem:
    return MoEProblem(layer=facts(), tokens=tokens, top_k=top_k, x_dtype=torch.bfloat16, device_type="cpu")


def test_facts_of_a_layer() -> None:
    layer = random_layer(
        num_experts=3, hidden_size=128, padded_intermediate_size=64, bits=8, group_size=64, symmetric=False
    )
    found = LayerFacts.of(layer)
    w13 = MatrixFacts(
        size_k=128, size_n=128, bits=8, num_groups=2, zero_points=True, sort_order=False, bias=False
    )
    assert found.w13 == w13
    assert found.w2 == dataclasses.replace(w13, size_k=64, num_groups=1)
    assert (found.num_experts, found.hidden_size, found.padded_intermediate_size) == (3, 128, 64)
    assert hash(found) == hash(LayerFacts.of(layer))


def test_facts_that_do_not_fit() -> None:
    with pytest.raises(MarlinMoEError, match=r"w13: expected K = 256 and N = 192, .*got K = 256, N = 384"):
        dataclasses.replace(facts(), gated=False)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("rows", [1, 7, 4096])
def test_buffers_are_those_of_the_problem(rows: int, gated: bool) -> None:
    plan = plan_workspace(
        facts(num_experts=12, hidden_size=256, padded_intermediate_size=192, gated=gated), rows=rows
    )
    sizes = {buffer.name: (buffer.dtype, buffer.shape, buffer.nbytes) for buffer in plan.buffers}
    width = 384 if gated else 192
    assert sizes == {
        "expert_offsets": (torch.int32, (13,), 52),
        "sorted_slots": (torch.int32, (rows,), 4 * rows),
        "row_of_slot": (torch.int32, (rows,), 4 * rows),
        "w13_output": (torch.float32, (rows, width), 4 * rows * width),
        "activations": (torch.float32, (rows, 192), 4 * rows * 192),
        "w2_output": (torch.float32, (rows, 256), 4 * rows * 256),
    }


def test_buffers_are_aligned_and_do_not_overlap() -> None:
    plan = plan_workspace(facts(num_experts=77), rows=33)
    for before, after in itertools.pairwise(plan.buffers):
        assert (
            before.offset_bytes + before.nbytes
            <= after.offset_bytes
            < before.offset_bytes + before.nbytes + 256
        )
    assert all(buffer.offset_bytes % 256 == 0 for buffer in plan.buffers)
    assert plan.nbytes == 256 * -(-(plan.buffers[-1].offset_bytes + plan.buffers[-1].nbytes) // 256)


def test_views_lie_where_the_plan_says() -> None:
    plan = plan_workspace(facts(), rows=5)
    scratch = torch.zeros(plan.nbytes, dtype=torch.uint8)
    for buffer in plan.buffers:
        view = buffer.view(scratch)
        assert (view.dtype, tuple(view.shape)) == (buffer.dtype, buffer.shape)
        assert view.data_ptr() == scratch.data_ptr() + buffer.offset_bytes
        assert view.is_contiguous()


def test_sizes_beyond_32_bits() -> None:
    plan = plan_workspace(facts(hidden_size=7168, padded_intermediate_size=2048), rows=2**20)
    assert plan.buffers[-1].nbytes == 2**20 * 7168 * 4
    assert plan.nbytes > 2**20 * 4 * (4096 + 2048 + 7168)
    assert plan_workspace(facts(), rows=2**33).rows == MAX_ROWS, "row numbers are int32"


def test_printed_as_a_table() -> None:
    text = str(plan_workspace(facts(), rows=5000))
    assert "E=12, H=256, Ip=192, 5,000 rows" in text
    rows = [line.split() for line in text.splitlines()[2:]]
    assert rows[0] == ["expert_offsets", "int32", "13", "0", "52"]
    assert rows[3] == ["w13_output", "float32", "5000", "x", "384", "40,704", "7,680,000"]
    assert len(rows) == 6


def test_lay_out_of_other_buffers() -> None:
    plan = WorkspacePlan.lay_out(
        "x", rows=1, buffers=[("a", torch.int64, (3,)), ("b", torch.bfloat16, (2, 200))]
    )
    assert [(b.offset_bytes, b.nbytes) for b in plan.buffers] == [(0, 24), (256, 800)]
    assert plan.nbytes == 1280


def test_buffers_of_one_name_are_one_as_large_as_the_largest() -> None:
    one = [("a", torch.int32, (4,)), ("shared", torch.bfloat16, (3, 200))]
    other = [("shared", torch.bfloat16, (7, 200)), ("b", torch.int32, (2,)), ("a", torch.int32, (3,))]
    assert overlaid(one, other) == [one[0], other[0], other[1]]
    assert overlaid(one) == one
    assert overlaid() == []


def test_no_rows() -> None:
    with pytest.raises(MarlinMoEError, match=r"workspace: expected at least one row, got 0"):
        plan_workspace(facts(), rows=0)


@pytest.mark.parametrize(
    ("tokens", "top_k", "rows", "chunks"),
    [
        (8, 2, 16, [(0, 8)]),
        (9, 2, 16, [(0, 8), (8, 9)]),
        (5, 3, 7, [(0, 2), (2, 4), (4, 5)]),
        (3, 4, 4, [(0, 1), (1, 2), (2, 3)]),
        (0, 4, 4, []),
    ],
)
def test_chunks(tokens: int, top_k: int, rows: int, chunks: list[tuple[int, int]]) -> None:
    plan = plan_moe(problem(tokens, top_k), plan_workspace(facts(), rows=rows))
    assert [(chunk.start, chunk.stop) for chunk in plan.chunks()] == chunks
    assert plan.num_chunks == len(chunks)


def test_workspace_smaller_than_a_token() -> None:
    with pytest.raises(MarlinMoEError, match=r"workspace: expected top_k = 8 rows or more.*got 7,.*top_k=8"):
        plan_moe(problem(1, 8), plan_workspace(facts(), rows=7))


@pytest.mark.parametrize(("tokens", "top_k"), [(-1, 1), (1, 0)])
def test_problem_sizes(tokens: int, top_k: int) -> None:
    with pytest.raises(MarlinMoEError, match=rf"tokens={tokens}, top_k={top_k}"):
        problem(tokens, top_k)
