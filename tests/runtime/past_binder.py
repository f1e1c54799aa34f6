"""Run by test_kernel.py in a process that does not interpret: launches past Triton's binder are those that it would make.

Prints one line per check; the exit code is the number of checks that failed.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl

from bench.host_call import arguments
from bench.no_launch import Launch, install

LOG = install(keep=True)

from generated import dispatch, forms, launch, target  # noqa: E402
from generated.call import AttentionCall  # noqa: E402
from generated.kernel import Kernel, passes_all_arguments  # noqa: E402
from generated.lookup import PACKAGE, serve  # noqa: E402
from generated.validate import build_call  # noqa: E402
from kgen.runtime.families import FAMILIES  # noqa: E402
from kgen.runtime.launch import make_plan  # noqa: E402
from kgen.runtime.table import Entry, Provenance, Shape, config  # noqa: E402

HERE = target.Target("sm90", "h200", "NVIDIA H200")
dispatch.target_of = lambda device: HERE
launch._sms = lambda device: 132

LAYOUTS = ("v32", "v4", "bf16_d576", "bf16_d512", "v41_inline")


def calls(given: dict[str, Any]) -> list[AttentionCall]:
    """Two calls of one form over different memory and with different scales."""
    forms._known.clear()
    other = {n: t.clone() if isinstance(t, torch.Tensor) and t.is_contiguous() else t for n, t in given.items()}
    made = [build_call(**given), build_call(**(other | {"sm_scale": given["sm_scale"] / 3}))]
    assert len(forms._known) == 1 and made[0].memo is made[1].memo is not None
    return made


def bound(call: AttentionCall) -> list[Any]:
    """What Triton's binder makes of the arguments of a call's kernels: their types and specialisations."""
    choice = serve("sm90", "h200", launch.call_shape(call)).choice
    plan = launch.make_plan(launch.call_shape(call), choice.entry, choice.exact)
    modules = launch.load_modules(PACKAGE, "sm90", choice.entry.module)
    scratch = launch._scratch_tensors(call, plan, None)
    args = launch.attention_args(call, scratch, plan, launch.item_counter(call, plan))
    jobs = [(modules.attention.attention_kernel, args, plan.constants | plan.options)]
    if plan.splits > 1:
        constants = launch.combine_constants(plan, call)
        jobs.append((modules.combine.combine_kernel, launch.combine_args(call, plan, scratch), constants))
    return [kernel.device_caches[0][4](*args, **keywords)[1:] for kernel, args, keywords in jobs]


def one_form_is_one_kernel() -> int:
    """Over layouts, head counts, token counts, padded tensors and odd starts; and the check can see: another start of q is
    another form, and another kernel."""
    count = 0
    for layout in LAYOUTS:
        for heads in (1, 8, 64):
            for tokens in (1, 3, 16, 64):
                extra = 64 if layout.startswith("v4") and heads == 8 else 0
                given = arguments(layout, heads, tokens, 64 if tokens > 1 else 7, extra)
                first, second = calls(given)
                assert bound(first) == bound(second), (layout, heads, tokens)
                wide = torch.zeros(tokens, heads + 1, given["q"].shape[-1] + 8, dtype=torch.bfloat16)
                padded = given | {"q": wide[:, :heads, : given["q"].shape[-1]]}
                first, third = calls(padded)
                assert bound(first) == bound(third), (layout, heads, tokens, "padded")
                count += 2
    given = arguments("bf16_d512", 8, 16, 64) | {"sm_scale": -1.0}  # so that one family serves both
    flat = torch.zeros(given["q"].numel() + 4, dtype=torch.bfloat16)
    shifted = given | {"q": flat[4:].view(given["q"].shape)}
    usual, odd = bound(build_call(**given)), bound(build_call(**shifted))
    assert [len(one) for one in usual] == [len(one) for one in odd] and usual != odd
    return count


def a_capture_asks_for_what_is_launched() -> int:
    """`is_compiled` binds what the launch binds, also where an item counter, which starts at a multiple of 16, comes behind
    indices that do not."""
    count, dynamic = 0, 0
    for layout, heads, tokens, topk, shift in (
        ("bf16_d512", 64, 1024, 64, 1), ("bf16_d576", 64, 1024, 2048, 1), ("bf16_d576", 64, 1024, 2048, 0),
        ("v32", 16, 4, 2048, 1), ("v32", 64, 16, 2048, 0),
    ):  # fmt: skip
        given = arguments(layout, heads, tokens, topk)
        given["indices"] = torch.zeros(tokens * topk + shift, dtype=torch.int32)[shift:].view(tokens, topk)
        call = build_call(**given)
        choice = serve("sm90", "h200", launch.call_shape(call)).choice
        asked: list[Any] = []

        def note(kernel: Any, args: tuple[Any, ...], keywords: dict[str, Any], asked: list[Any] = asked) -> bool:
            asked.append(kernel.device_caches[0][4](*args, **keywords)[1:])
            return True

        real, launch.in_cache = launch.in_cache, note
        try:
            assert launch.is_compiled(call, "sm90", choice.entry, choice.exact, PACKAGE)
        finally:
            launch.in_cache = real
        assert asked == bound(call), (layout, heads, tokens, shift)
        count += 1
        dynamic += bool(choice.entry.config.get("dynamic", False))
    table = target.load_table("sm90")
    assert table is not None
    assert dynamic > 0 or not any(entry.config.get("dynamic", False) for entry in table.entries), "none has a counter"
    return count


def same(a: Launch, b: Launch, moved: bool) -> bool:
    """Whether two launches agree; tensors by their address, or with `moved` only by type."""

    def seen(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return value.dtype if moved else (value.dtype, value.data_ptr())

    args = [tuple(map(seen, launch.args)) for launch in (a, b)]
    return (a.kernel, a.grid) == (b.kernel, b.grid) and args[0] == args[1] and len(args[0]) > 20


def launches_are_the_binder_s() -> int:
    """The merge, compiled for real: first through the binder, then past it, then through it again with the same tensors."""
    call, other = calls(arguments("v32", 16, 4, 2048))
    choice = serve("sm90", "h200", launch.call_shape(call)).choice
    plan = launch.make_plan(launch.call_shape(call), choice.entry, choice.exact)
    assert plan.splits > 1
    modules = launch.load_modules(PACKAGE, "sm90", choice.entry.module)
    constants = launch.combine_constants(plan, call)
    scratch = launch._scratch_tensors(other, plan, None)
    made = Kernel(modules.combine.combine_kernel, (64, 512 // constants["BLOCK_D"]), constants)
    LOG.launches.clear()
    made(launch.combine_args(call, plan, launch._scratch_tensors(call, plan, None)))
    args = launch.combine_args(other, plan, scratch)
    binder = modules.combine.combine_kernel.device_caches[0][4]
    assert made._compiled is not None
    made(args)
    again = Kernel(modules.combine.combine_kernel, (64, 512 // constants["BLOCK_D"]), constants)
    again(args)
    first, past, through = LOG.launches
    assert same(first, past, moved=True) and not same(first, past, moved=False)
    assert same(past, through, moved=False)
    # all arguments of the function, constants included, in its order
    assert tuple(past.args) == tuple(binder(*args, **constants)[0].values())
    return 3


def hooks_go_through_the_binder() -> int:
    """Someone who asks Triton to be told of every run still is."""
    call = calls(arguments("v32", 16, 4, 2048))[0]
    choice = serve("sm90", "h200", launch.call_shape(call)).choice
    plan = launch.make_plan(launch.call_shape(call), choice.entry, choice.exact)
    kernel = launch.load_modules(PACKAGE, "sm90", choice.entry.module).combine.combine_kernel
    constants = launch.combine_constants(plan, call)
    made, told = Kernel(kernel, (64, 1), constants), []
    args = launch.combine_args(call, plan, launch._scratch_tensors(call, plan, None))
    made(args)
    kernel.add_pre_run_hook(lambda *args, **kwargs: told.append(len(args)))
    made(args)
    kernel.pre_run_hooks.clear()
    made(args)
    assert told == [len(args)]
    return 1


def a_second_call_goes_past_the_binder() -> int:
    """The public function, twice in one form and once in another: binders are asked once per kernel and form."""
    given = arguments("bf16_d512", 16, 2, 64)
    forms._known.clear()
    LOG.launches.clear()
    asked = []
    run = launch.Kernel.__call__

    def watched(self: Kernel, args: tuple[Any, ...]) -> None:
        asked.append(self._compiled is None)
        run(self, args)

    launch.Kernel.__call__ = watched  # type: ignore[method-assign]
    try:
        for _ in range(3):
            dispatch.sparse_mla(**given)
        each = len(asked) // 3
        assert asked == [True] * each + [False] * 2 * each and LOG.count >= 3 * each
        assert same(LOG.launches[0], LOG.launches[each], moved=True)
        dispatch.sparse_mla(**(given | {"return_lse": False}))
        assert asked[3 * each :] == [True] * each
    finally:
        launch.Kernel.__call__ = run  # type: ignore[method-assign]
    memo = build_call(**given).memo
    assert memo is not None and launch.was_launched(build_call(**given), memo.kernels.served[1], memo.kernels.served[2])
    assert replace(build_call(**given), tokens=1).memo is None
    return 2


@triton.jit
def _store(out, X: tl.constexpr):
    tl.store(out + tl.arange(0, X), tl.program_id(0))


def clusters_stay_clusters() -> int:
    """What `launch.Plan.options` asks for reaches the driver, through the binder and past it."""
    shape = Shape("v4", 128, 128, 64, 500)
    tunables = {"block_h": 64, "block_k": 128, "persistent": True, "latent": "bf16"}
    for family in (FAMILIES["sm90_pair_fp8"], FAMILIES["sm90_cluster_fp8"]):
        entry = Entry(
            "v4", False, 128, (128, 128), (0, 0), 64, None, (1, 4096), f"{family.name}_v4", config(4, 1, **tunables),
            Provenance("measured", "h200"),
        )  # fmt: skip
        made = Kernel(_store, (5,), {"X": 128} | make_plan(shape, entry, exact=False).options)
        LOG.launches.clear()
        for _ in range(2):
            made((torch.zeros(128, dtype=torch.int32),))
        assert made._compiled is not None
        found = [(each.grid, each.ctas) for each in LOG.launches]
        assert found == [((5, 1, 1), 2 if "cluster" in family.name else 1)] * 2, family.name
    return 2


CHECKS = (
    one_form_is_one_kernel,
    a_capture_asks_for_what_is_launched,
    launches_are_the_binder_s,
    hooks_go_through_the_binder,
    a_second_call_goes_past_the_binder,
    clusters_stay_clusters,
)


def main() -> int:
    assert passes_all_arguments(), triton.__version__
    failed = 0
    for check in CHECKS:
        try:
            print(f"{check.__name__}: {check()} with Triton {triton.__version__}", flush=True)
        except Exception as error:
            failed += 1
            print(f"{check.__name__}: {type(error).__name__}: {error}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
