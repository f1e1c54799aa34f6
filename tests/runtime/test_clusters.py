"""Families whose programs are clusters: what a launch passes, how many programs it has, and who serves what they cannot."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kgen import compile_child, verify_shards
from kgen.build import ProbeJob, attention_job
from kgen.runtime import kernel, launch, lookup, target
from kgen.runtime.call import AttentionCall
from kgen.runtime.dispatch import Unsupported, explain, sparse_mla, supports, warmup, workspace_size
from kgen.runtime.families import FAMILIES, Family, grid_of, known_family
from kgen.runtime.select import cannot_serve, select
from kgen.runtime.table import Entry, Shape
from kgen.runtime.target import MAX_CLUSTER, Target
from kgen.runtime.validate import build_call
from kgen.types import Candidate, KernelSpec, LaunchOptions

from .conftest import FakeTree
from .samples import arguments, entry

CLUSTER = FAMILIES["sm90_cluster_fp8"]
TUNABLES = {
    "block_h": 64, "block_k": 128, "splits": 1, "specialise": False, "latent": "bf16", "persistent": True, "nw": 4,
    "r_right": 200, "r_producer": 104, "slack": 8,
}  # fmt: skip


def gluon(family: str, heads: int = 128, tier: int = 0) -> Entry:
    made = entry("v4", heads, (1, 128), module=f"{family}_v4", us=10.0 + tier)
    tunables = tuple(sorted(TUNABLES.items()))
    return replace(made, config=replace(made.config, tunables=tunables, num_stages=1), tier=tier)


FAST, OTHER = gluon("sm90_cluster_fp8"), gluon("sm90_pair_fp8", tier=2)
PLAIN = replace(entry("v4", 128, (1, 128), us=30.0), tier=4)
TABLE = (PLAIN, OTHER, FAST)


class Counted:
    def __init__(self, real: Any) -> None:
        self.real, self.count = real, 0

    def __call__(self, *args: Any, **more: Any) -> Any:
        self.count += 1
        return self.real(*args, **more)


def call_of(heads: int, tokens: int, topk: int = 6) -> AttentionCall:
    return build_call(**arguments(heads=heads, tokens=tokens, topk=topk))


class Jit:
    """Records how it is launched and warmed up."""

    pre_run_hooks: tuple[Any, ...] = ()
    arg_names: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.log: list[tuple[tuple[int, ...], dict[str, Any]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **keywords: self.log.append((grid, keywords))

    def warmup(self, *args: Any, grid: tuple[int, ...], **keywords: Any) -> None:
        self.log.append((grid, keywords))


def launched(made: Entry, heads: int, tokens: int, monkeypatch: pytest.MonkeyPatch, topk: int = 6) -> tuple[Jit, Jit]:
    """The attention kernel and the merge of one launch on a device of 132 SMs."""
    monkeypatch.setattr(launch, "_sms", lambda device: 132)
    call = call_of(heads, tokens, topk)
    plan = launch.make_plan(launch.call_shape(call), made, exact=False)
    attention, merge = Jit(), Jit()
    modules = SimpleNamespace(
        attention=SimpleNamespace(attention_kernel=attention), combine=SimpleNamespace(combine_kernel=merge)
    )
    launch.launch(call, plan, modules)  # type: ignore[arg-type]
    return attention, merge


@pytest.mark.parametrize(("tokens", "programs"), [(3, 3), (66, 66), (67, 66), (500, 66)])
def test_a_launch_asks_for_clusters_in_a_grid_of_clusters(
    tokens: int, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An item has both head blocks of a token, and a cluster two SMs of the 132."""
    ((grid, keywords),) = launched(FAST, 128, tokens, monkeypatch)[0].log
    assert grid == (programs,) and keywords["num_ctas"] == 2 and keywords["num_warps"] == 4
    ((grid, keywords),) = launched(OTHER, 128, tokens, monkeypatch)[0].log
    assert grid == (min(2 * tokens, 132),) and "num_ctas" not in keywords


def test_the_merge_of_a_cluster_s_parts_is_launched_as_any(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tokens by a kernel that was tuned for 64 are split until they fill about 128 SMs: an item takes two of them."""
    tuned = replace(FAST, provenance=replace(FAST.provenance, anchor_tokens=64))
    attention, merge = launched(tuned, 128, 2, monkeypatch, topk=128 * 40)
    assert attention.log[0][0] == (64,)
    ((grid, keywords),) = merge.log
    assert grid[0] == 2 * 128 and "num_ctas" not in keywords


def test_a_capture_and_a_warm_up_ask_for_the_same_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(launch, "interpreting", lambda: False)
    monkeypatch.setattr(launch, "in_cache", lambda kernel, args, keywords: bool(asked.append(keywords)) or True)
    modules = SimpleNamespace(attention=SimpleNamespace(attention_kernel=Jit()), combine=None)
    monkeypatch.setattr(launch, "load_modules", lambda *names: modules)
    assert launch.is_compiled(call_of(128, 3), "sm90", FAST, False, "generated")
    assert [keywords["num_ctas"] for keywords in asked] == [2]
    one = Jit()
    kernel.in_cache(one, (), asked[0])
    assert one.log[0][1]["num_ctas"] == 2


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.name)
@pytest.mark.parametrize("sms", [1, 2, 3, 132])
def test_grids(family: Family, sms: int) -> None:
    """No launch is empty, and a persistent one has no more blocks than SMs, but for the one cluster that there must be."""
    for tokens in (1, 5, 200):
        grid = grid_of(family, True, tokens, 2, 3, sms)
        whole = grid_of(family, False, tokens, 2, 3, sms)
        assert min(grid) > 0
        if not family.plane:
            assert (
                grid[0] * family.ctas <= max(sms, family.ctas) and grid[0] <= whole[0] == tokens * 3 * 2 // family.ctas
            )


def test_a_compile_child_compiles_what_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    seen: list[dict[str, Any]] = []

    def compile(source: Any, target: Any, options: dict[str, Any]) -> Any:
        seen.append(options)
        raise RuntimeError("enough")

    monkeypatch.setattr(triton, "compile", compile)
    for family, ctas in (("sm90_cluster_fp8", {"num_ctas": 2}), ("sm90_pair_fp8", {})):
        candidate = Candidate.make(family, TUNABLES, LaunchOptions(4, 1))
        job = attention_job(KernelSpec("sm90", "v4", 128, 128, 64, 64), candidate, 90)
        fields = {name: getattr(job, name) for name in ProbeJob.__dataclass_fields__}
        assert "enough" in compile_child._compile(fields)["error"]
        assert seen[-1] == {"num_warps": 4, **ctas}


def test_keys_of_compile_results_hold_the_blocks_of_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    candidate = Candidate.make("sm90_cluster_fp8", TUNABLES, LaunchOptions(4, 1))
    jobs = [attention_job(KernelSpec("sm90", "v4", 128, 128, 64, 64), candidate, cc) for cc in (90, 91)]
    two = [job.key for job in jobs]
    from kgen import build

    monkeypatch.setitem(build.FAMILIES, "sm90_cluster_fp8", replace(CLUSTER, ctas=1))
    build._job_key.cache_clear()
    try:
        assert not set(two) & {job.key for job in jobs} and len(set(two)) == 2
    finally:
        build._job_key.cache_clear()


# ------------------------------------------------------------------------------------------------ who serves


@pytest.mark.parametrize("heads", [1, 16, 64, 65, 127, 128])
def test_few_heads_go_to_another_family(heads: int) -> None:
    """Also where the cluster's entry is the nearest one."""
    shape = Shape("v4", heads, 128, 64, 5)
    choice = select(TABLE, shape, "h200")
    assert choice is not None and choice.entry is (FAST if heads > 64 else OTHER)
    assert (cannot_serve(FAST, shape) is None) == (heads > 64)
    if heads <= 64:
        against = dict(choice.rivals)[FAST]
        assert against == f"Its kernel gives every block of a cluster heads of its own: it needs 65 heads, not {heads}."
    assert known_family("sm90_later_v4", "v4") is None and cannot_serve(replace(FAST, module="x"), shape) is None


def target_with(monkeypatch: pytest.MonkeyPatch, cluster: int) -> None:
    found = Target("sm90", "h200", "NVIDIA H200", cluster)
    for module in ("dispatch", "explain"):
        monkeypatch.setattr(f"kgen.runtime.{module}.target_of", lambda device: found)
    monkeypatch.setattr("kgen.runtime.explain.default_target", lambda: found)


@pytest.mark.parametrize(("cluster", "family"), [(MAX_CLUSTER, "cluster"), (2, "cluster"), (1, "pair")])
def test_a_device_without_room_for_a_cluster_takes_another_family(
    tree: FakeTree, monkeypatch: pytest.MonkeyPatch, cluster: int, family: str, caplog: pytest.LogCaptureFixture
) -> None:
    tree.set_table(TABLE)
    target_with(monkeypatch, cluster)
    given, shape = arguments(heads=128), Shape("v4", 128, 6, 4, 5)
    with caplog.at_level(logging.WARNING):
        sparse_mla(**given)
    assert tree.launched[-1].entry.module == f"sm90_{family}_fp8_v4"
    assert "cluster" not in caplog.text  # what a device is, is no news
    assert explain(shape).entry.module == f"sm90_{family}_fp8_v4"
    assert workspace_size(shape) > 0
    tree.launched.clear()
    warmup([shape], device="cpu")
    assert {done.entry.module for done in tree.launched} == {f"sm90_{family}_fp8_v4"}


def test_where_nothing_else_serves_the_reason_is_said(tree: FakeTree, monkeypatch: pytest.MonkeyPatch) -> None:
    tree.set_table((FAST,))
    target_with(monkeypatch, 1)
    with pytest.raises(Unsupported) as raised:
        sparse_mla(**arguments(heads=128))
    reason = "sm90_cluster_fp8_v4 is launched in clusters of 2 blocks, for which the device has too few SMs."
    assert raised.value.reasons[0] == reason and raised.value.reasons[1].startswith("To add an entry: kgen tune")
    assert supports(**arguments(heads=128)) == raised.value.reasons
    with pytest.raises(Unsupported, match="1 entry: Its kernel gives every block of a cluster heads of its own"):
        lookup.choose("sm90", "h200", Shape("v4", 64, 6, 4, 5))


@pytest.mark.parametrize(("heads", "wanted"), [(64, OTHER), (128, FAST)])
def test_plans_of_a_verification_have_what_the_look_up_serves(tree: FakeTree, heads: int, wanted: Entry) -> None:
    """They ask a part of the table, which is the same for all head counts."""
    tree.set_table(TABLE)
    for cached in (verify_shards._choice, verify_shards._first):
        cached.cache_clear()
    asked = tree.monkeypatch
    asked.setattr(verify_shards, "_taken", {})
    asked.setattr(lookup, "choose", one := Counted(lookup.choose))
    shape = Shape("v4", heads, 128, 64, 5, fp16=True)
    try:
        for tokens in (5, 6, 7):
            assert verify_shards._choice(replace(shape, tokens=tokens), "kgen.runtime", "sm90", "h200")[0] is wanted
    finally:
        for cached in (verify_shards._choice, verify_shards._first):
            cached.cache_clear()
    assert one.count == 1, "the part of the table lacks what is served, so that the whole one was asked"


def test_a_triton_outside_the_range_takes_another_family(tree: FakeTree) -> None:
    tree.set_table(TABLE)
    tree.set_module("sm90_cluster_fp8_v4", triton_range=("3.0", "3.1"))
    assert lookup.choose("sm90", "h200", Shape("v4", 128, 6, 4, 5)).entry is OTHER


@pytest.mark.parametrize(("sms", "cluster"), [(1, 1), (2, 2), (16, 8), (132, 8)])
def test_a_target_knows_the_clusters_of_its_device(
    tree: FakeTree, monkeypatch: pytest.MonkeyPatch, sms: int, cluster: int
) -> None:
    properties = SimpleNamespace(multi_processor_count=sms)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H200 MIG 1g.18gb")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    found = target.target_of(torch.device("cuda", 0))
    assert (found.device_class, found.cluster) == ("h200", cluster)
