"""`marlin-moe kernels build`: what it compiles for a checkpoint, source or packed, and what it says."""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from checkpoints import write_checkpoint
from marlin_moe import Shard, load_layers, repack_checkpoint
from marlin_moe.cli.main import main
from marlin_moe.kernels.backends.cuda_moe import build_spec, build_specs
from marlin_moe.kernels.errors import JitError, MarlinMoEError
from marlin_moe.kernels.jit.build import CompileReport, obtain_cubin
from marlin_moe.kernels.jit.spec import BuildSpec
from marlin_moe.kernels.plan.cuda_moe import choose_variant
from marlin_moe.kernels.plan.problem import LayerFacts
from marlin_moe.kernels.plan.reference import plan_workspace
from marlin_moe.repack import build_kernels as module
from marlin_moe.repack.build_kernels import build_kernels, layer_facts
from marlin_moe.repack.rank_facts import all_ranks, rank_facts, workspace_bytes

FORMATS: dict[str, dict[str, Any]] = {
    "plain": {},
    "asymmetric, w2 of 8 bits": {"symmetric": False, "down_bits": 8, "group_size": 64, "hidden_size": 256},
    "one scale per column": {"bits": 8, "group_size": None, "dtype": torch.float16},
    "act-order": {"actorder": "group", "hidden_size": 128, "intermediate_size": 128},
    "biased, padded": {"bias": True, "intermediate_size": 96},
    "cut groups": {"intermediate_size": 192, "group_size": 64},
}
SPLITS = [(1, 1), (2, 1), (1, 3), (2, 4)]


def build(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["kernels", "build", *map(str, arguments)])


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[BuildSpec]:
    """Nothing is compiled; what was asked for, with a report of each that looks like a real one."""
    asked: list[BuildSpec] = []

    def compile_all(specs: Iterable[BuildSpec], *, must_store: bool) -> list[CompileReport]:
        assert must_store
        asked.extend(specs)
        return [
            CompileReport(
                name=spec.title,
                arch=spec.arch,
                key=f"{number:064x}",
                cached=number % 2 == 1,
                seconds=2.25,
                registers=168,
                spill_store_bytes=8,
                spill_load_bytes=12,
                static_smem_bytes=1024,
                cubin_bytes=50_000,
                warnings=(),
            )
            for number, spec in enumerate(asked)
        ]

    monkeypatch.setattr(module, "compile_all", compile_all)
    return asked


def moe_specs(specs: Iterable[BuildSpec]) -> set[BuildSpec]:
    sources = ("moe.cu", "decode.cu", "prefill_gemm.cu", "prefill_route.cu")
    return {spec for spec in specs if spec.source.name in sources}


@pytest.mark.parametrize(("tp", "ep"), SPLITS)
@pytest.mark.parametrize("changes", FORMATS.values(), ids=FORMATS)
def test_facts_are_those_of_the_loaded_ranks(
    tmp_path: Path, changes: dict[str, Any], tp: int, ep: int
) -> None:
    write_checkpoint(tmp_path, **({"num_experts": 5} | changes))
    ((facts,), top_k) = layer_facts(tmp_path)
    assert top_k == json.loads((tmp_path / "config.json").read_text())["num_experts_per_tok"]
    found = []
    for tp_rank in range(tp):
        for ep_rank in range(ep):
            rank = {"tp": Shard(tp_rank, tp), "ep": Shard(ep_rank, ep)}
            try:
                (layer,) = load_layers(tmp_path, **rank).values()
            except MarlinMoEError:
                with pytest.raises(MarlinMoEError):
                    rank_facts(facts, **rank)
                return
            assert rank_facts(facts, **rank) == LayerFacts.of(layer), rank
            found.append(LayerFacts.of(layer))
    assert all_ranks(facts, tp=tp, ep=ep) == list(dict.fromkeys(found))
    planned = workspace_bytes(facts, tp=tp, ep=ep, rows=256)
    assert planned["reference"] == max(plan_workspace(facts, rows=256).nbytes for facts in found)


def test_a_packed_checkpoint_needs_what_its_source_needs(tmp_path: Path, compiled: list[BuildSpec]) -> None:
    write_checkpoint(tmp_path / "source", num_layers=2, symmetric=False, intermediate_size=192)
    repack_checkpoint(tmp_path / "source", tmp_path / "packed")
    for path in ("source", "packed"):
        build_kernels(tmp_path / path, ["sm_90a"], tp=2)
    half = len(compiled) // 2
    assert compiled[:half] == compiled[half:]


def test_every_variant_that_a_rank_can_choose_is_built(tmp_path: Path, compiled: list[BuildSpec]) -> None:
    write_checkpoint(tmp_path, num_layers=3, down_bits=8, intermediate_size=128)
    report = build_kernels(tmp_path, ["sm_80", "sm_90a", "sm_80"], tp=2, ep=2, max_tokens=400, top_k=2)
    assert (report.layers, report.archs, report.top_k) == (3, ("sm_80", "sm_90a"), 2)
    ranks = [
        LayerFacts.of(layer)
        for rank in range(2)
        for layer in load_layers(tmp_path, tp=Shard(rank, 2), ep=Shard(rank, 2)).values()
    ]
    wanted = {
        spec
        for facts in ranks
        for tokens in range(1, 401)
        for arch in ("sm_80", "sm_90a")
        for spec in build_specs(choose_variant(facts, rows=2 * tokens, arch=arch), arch)
    }
    sources = {"decode.cu", "moe.cu", "prefill_gemm.cu", "prefill_route.cu"}
    assert {spec.source.name for spec in wanted} == sources
    assert moe_specs(compiled) == wanted
    assert len(compiled) == len(set(compiled)) == len(report.kernels)


def test_fewer_rows_need_fewer_variants(tmp_path: Path, compiled: list[BuildSpec]) -> None:
    write_checkpoint(tmp_path, num_experts=4)
    counts: dict[str, list[int]] = {"sm_80": [], "sm_90a": []}
    for arch, found in counts.items():
        for max_tokens in (1, 20, 8192):
            compiled.clear()
            build_kernels(tmp_path, [arch], max_tokens=max_tokens, top_k=2)
            found.append(len(moe_specs(compiled)))
    assert counts["sm_80"] == [1, 2, 3 + 1]  # the decode path's, and one of the general path
    assert counts["sm_90a"] == [1, 2, 3 + 1 + 2 * 5]  # the route's and two GEMMs of each tile


def test_the_table_and_the_last_line(tmp_path: Path, compiled: list[BuildSpec]) -> None:
    write_checkpoint(tmp_path)
    result = build(tmp_path, "--arch", "sm_90a")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.splitlines()[0].split() == [
        *("kernel", "arch", "cached", "seconds", "registers", "spilled", "shared", "size")
    ]
    assert re.search(
        r"decode bf16 w4g32-w4g32 tile 8 of 128 x 128 +sm_90a +no +2\.2 +168 +20 B +1\.02 kB +50\.0? kB",
        result.stdout,
    )
    last = result.stdout.splitlines()[-1]
    assert f"1 layer, tp=1, ep=1, up to 8,192 tokens, top-2: {len(compiled)} kernels" in last


def test_json_is_the_report(tmp_path: Path, compiled: list[BuildSpec]) -> None:
    write_checkpoint(tmp_path)
    result = build(tmp_path, "--arch", "sm_80,sm_90a", "--tp", "2", "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    report = json.loads(result.stdout)
    assert (report["archs"], report["tp"], report["max_tokens"]) == (["sm_80", "sm_90a"], 2, 8192)
    assert {kernel["arch"] for kernel in report["kernels"]} == {"sm_80", "sm_90a"}
    assert {"name", "cached", "seconds", "registers", "spill_load_bytes"} <= report["kernels"][0].keys()


@pytest.mark.parametrize(
    ("arch", "said"),
    [
        ("sm_75", "from sm_80 on"),
        ("hopper", "from sm_80 on"),
        ("sm_90", "expected sm_90a"),
        ("sm_80a", "expected sm_80"),
        ("sm_80,,sm_90a", "got ''"),
    ],
)
def test_a_wrong_architecture_is_a_wrong_flag(tmp_path: Path, arch: str, said: str) -> None:
    write_checkpoint(tmp_path)
    result = build(tmp_path, "--arch", arch)
    assert result.exit_code == 2
    assert said in result.stderr


def test_a_split_that_does_not_fit_is_a_failed_check(tmp_path: Path, compiled: list[BuildSpec]) -> None:
    write_checkpoint(tmp_path, intermediate_size=96)
    result = build(tmp_path, "--arch", "sm_90a", "--tp", "2")
    assert result.exit_code == 1
    assert "TP sizes that work: 1, 3" in result.stderr
    result = build(tmp_path, "--arch", "sm_90a", "--ep", "99")
    assert result.exit_code == 1
    assert "EP sizes up to" in result.stderr
    assert not compiled


def test_a_split_that_does_not_fit_names_the_layer(tmp_path: Path, compiled: list[BuildSpec]) -> None:
    write_checkpoint(tmp_path, num_layers=2, intermediate_size=128)
    (first, second), _ = layer_facts(tmp_path)
    assert first.module != second.module
    result = build(tmp_path, "--arch", "sm_90a", "--tp", "3")
    assert result.exit_code == 1
    assert f"{first.module}: expected the intermediate size 128 to split over tp=3" in result.stderr
    assert not compiled


def test_scales_that_cuda_does_not_compute_in_need_a_dtype(tmp_path: Path, compiled: list[BuildSpec]) -> None:
    write_checkpoint(tmp_path, dtype=torch.float32)
    result = build(tmp_path, "--arch", "sm_90a")
    assert result.exit_code == 1
    assert "--dtype" in result.stderr
    assert build(tmp_path, "--arch", "sm_90a", "--dtype", "float16").exit_code == 0
    assert {dict(spec.constants)["FP16"] for spec in moe_specs(compiled)} == {True}


def test_a_cache_in_which_nothing_can_be_stored_is_a_failed_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path / "source", num_experts=4)
    (tmp_path / "file").touch()
    for place in ("/proc/x", str(tmp_path / "file")):
        monkeypatch.setenv("MARLIN_MOE_CACHE", place)
        result = build(tmp_path / "source", "--arch", "sm_80", "--max-tokens", "1")
        assert (result.exit_code, result.stdout) == (1, "")
        (line,) = result.stderr.splitlines()
        assert line.startswith(f"error: {place}: expected a folder to store compiled kernels in")
        assert "Nothing was stored" in line


def test_a_variable_that_says_something_impossible_is_bad_input(
    tmp_path: Path, compiled: list[BuildSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path)
    monkeypatch.setenv("MARLIN_MOE_JIT", "bogus")
    result = build(tmp_path, "--arch", "sm_90a")
    assert result.exit_code == 1
    assert re.fullmatch(r"error: MARLIN_MOE_JIT: expected .* got 'bogus'\. Unset it .*\n", result.stderr)
    assert not compiled


def test_what_was_built_is_found_where_compiling_is_forbidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Really compiled, one variant: the second run and a forbidding process find it in the cache."""
    monkeypatch.setenv("MARLIN_MOE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "repack_specs", lambda arch: (), raising=False)
    write_checkpoint(tmp_path / "source", num_experts=4)
    arguments = (tmp_path / "source", "--arch", "sm_80", "--max-tokens", "1", "--json")
    reports = []
    for _ in range(2):
        result = build(*arguments)
        assert result.exit_code == 0, result.stderr
        reports.append(json.loads(result.stdout)["kernels"])
    ((first,), (second,)) = reports
    assert (first["cached"], second["cached"]) == (False, True)
    assert first["key"] == second["key"]
    monkeypatch.setenv("MARLIN_MOE_JIT", "forbid")
    (layer,) = load_layers(tmp_path / "source").values()
    facts = LayerFacts.of(layer)
    assert obtain_cubin(build_spec(choose_variant(facts, rows=2, arch="sm_80"), "sm_80")).key == first["key"]
    with pytest.raises(JitError, match=r"marlin-moe kernels build PATH --arch sm_80"):
        obtain_cubin(build_spec(choose_variant(facts, rows=1000, arch="sm_80"), "sm_80"))
