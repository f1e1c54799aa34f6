"""Check and time templates/sm90_ws_fp8 on one H200 (python3.12, torch 2.11, triton 3.6).  PYTHONPATH=. python3 .gpu/sm90_ws_fp8_check.py [check] [trial] [time] [only=TEXT]
Kernels are compiled first, in parallel processes that fill Triton's cache. Compact lines; exit 1 when a check fails. About 75 s."""
import dataclasses, importlib.util, os, sys, time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
import jinja2, torch
from kgen.check import CaseSpec, attention_reference, compare, make_case, tolerance_for
from kgen.check.tuning import tuning_inputs
from kgen.runtime.call import AttentionCall
from kgen.runtime.families import FAMILIES
from kgen.runtime.launch import Modules, Plan, _scratch_tensors, attention_args, combine_args, combine_constants, launch
from kgen.runtime.layouts import LAYOUTS
from kgen.runtime.table import Config
from kgen.runtime.validate import build_call
from kgen.types import KernelSpec

T0 = time.time()
FOLDER = os.environ.get("WS8_FOLDER", "/tmp/ws8_modules")
env = jinja2.Environment(loader=jinja2.FileSystemLoader("templates"), undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
env.filters["py"] = repr
BASE = dict(block_h=64, block_k=64, latent="fp16", persistent=True, nw=4, rp=32, r_value=224, r_prod=120, n_value=256, slack=8, prefetch=False)
NW8 = dict(nw=8, n_value=128, r_prod=72)
ONE = dict(rp=64)  # one register set for a whole tile
NW8ONE = dict(rp=64, nw=8, n_value=128, r_prod=72)
VARIANTS = {"base": {}, "p128": dict(r_prod=128), "one": ONE, "one8": NW8ONE, "nw8": NW8, "bf16": dict(latent="bf16"), "bf16one": ONE | dict(latent="bf16"), "bf16one8": NW8ONE | dict(latent="bf16")}
for k in ("late", "unmask", "noload", "noconv", "nopv", "norescale", "noscale"):
    VARIANTS["p128-" + k] = dict(r_prod=128, patch=(k,))
    VARIANTS["one-" + k] = ONE | dict(patch=(k,))
VARIANTS["p128-noload-late"] = dict(r_prod=128, patch=("noload", "late"))
VARIANTS["p128-noload-nopv"] = dict(r_prod=128, patch=("noload", "nopv"))
VARIANTS["p128-noload-noconv"] = dict(r_prod=128, patch=("noload", "noconv"))
VARIANTS["one-grid"] = ONE | dict(persistent=False)
# Changes of the text, each [old, new, ...]; all but `late` and `unmask` are wrong by design
PATCHES = {
    "late": ["""            if j + 1 < count:
                sn = (g + 1) % 2""", """            oa, ob, p = warpgroup_mma_wait(0, deps=[ya, yb, p])
            if j + 1 < count:
                mbarrier.arrive(empty.index(st), count=1)
                sn = (g + 1) % 2""",
             """                oa, ob, p = warpgroup_mma_wait(SCORE_MMAS, deps=[ya, yb, x])
                mbarrier.arrive(empty.index(st), count=1)
""", """                p = warpgroup_mma_wait(0, deps=[x])
""", """                oa, ob, p = warpgroup_mma_wait(0, deps=[ya, yb, p])
                if SPLIT:""", """                if SPLIT:"""],
    "unmask": ["    raw = gl.load(words + (row + col), mask=row >= 0, other=0)", "    raw = gl.load(words + (gl.maximum(row, 0) + col))",
               "mask=unit_row >= 0, other=0.0)", ")", "gl.load(scales + (unit_row +", "gl.load(scales + (gl.maximum(unit_row, 0) +",
               "mask=gl.broadcast(row >= 0, row + col)[0])", ")"],
    "noload": ["raw = gl.load(words + (row + col), mask=row >= 0, other=0)", "raw = (row + col).to(gl.int32) & 0x37373737",
               "scale = gl.load(scales + (unit_row + (SCALE_WORD + group)), mask=unit_row >= 0, other=0.0)", "scale = (unit_row + (SCALE_WORD + group)).to(gl.int32).to(gl.float32) * 1e-12",
               "mask=gl.broadcast(row >= 0, row + col)[0])", "mask=gl.broadcast(row < -7, row + col)[0])"],
    "noscale": ["scale = gl.load(scales + (unit_row + (SCALE_WORD + group)), mask=unit_row >= 0, other=0.0)", "scale = (unit_row + (SCALE_WORD + group)).to(gl.int32).to(gl.float32) * 1e-12"],
    "noconv": ["lo, hi = dequantise_fp16(raw, gl.expand_dims(gl.convert_layout(pack_half2(factor), gl.SliceLayout(2, L)), 2))", "lo = raw & 0x37373737\n        hi = lo"],
    "nopv": ["yl = warpgroup_mma(kp.index(st), kl.index(st), ol, is_async=True)", "", "ym = warpgroup_mma(kp.index(st), kr.index(st).slice(0, 128, dim=1), om, is_async=True)", "",
             "ol, om = warpgroup_mma_wait(0, deps=[yl, ym])", ""],
    # clock readings into `lengths`, which is not read as such without has_len
    "clk": ["@gluon.jit\ndef rescale(", """@gluon.jit
def tick(buf, g, P: gl.constexpr, E: gl.constexpr):
    x = gl.inline_asm_elementwise("mov.u32 $0, %clock; // $1", "=r,r", [g], dtype=gl.int32, is_pure=False, pack=1)
    gl.store(buf + (gl.program_id(0) * 2048 + P * 512 + (g % 64) * 8 + E), x)


@gluon.jit
def rescale(""",
            "    rows, tile, last, g, tiles_main,", "    lengths, rows, tile, last, g, tiles_main,", "rows, first + j, last, g0 + j, tiles_main,", "lengths, rows, first + j, last, g0 + j, tiles_main,",
            "        mbarrier.wait(empty.index(st), ((g // 2) & 1) ^ 1)\n", "        tick(lengths, g, 0, 0)\n        mbarrier.wait(empty.index(st), ((g // 2) & 1) ^ 1)\n        tick(lengths, g, 0, 1)\n",
            "    if Q == NP - 1:\n        mbarrier.arrive(full", "    tick(lengths, g, 0, 2 + Q)\n    if Q == NP - 1:\n        mbarrier.arrive(full",
            "        # the addresses of the tile after the next one, while", "        tick(lengths, g, 0, 4)\n        # the addresses of the tile after the next one, while",
            "    return ahead\n", "    if Q == NP - 1:\n        tick(lengths, g, 0, 5)\n    return ahead\n",
            "                mbarrier.wait(full.index(sn), ((g + 1) // 2) & 1)\n", "                tick(lengths, g, 1, 0)\n                mbarrier.wait(full.index(sn), ((g + 1) // 2) & 1)\n                tick(lengths, g, 1, 1)\n",
            "            p = warpgroup_mma_wait(0, deps=[p])\n\n", "            p = warpgroup_mma_wait(0, deps=[p])\n            tick(lengths, g, 1, 3)\n\n",
            "                mbarrier.arrive(empty.index(st), count=1)\n                valid", "                mbarrier.arrive(empty.index(st), count=1)\n                tick(lengths, g, 1, 2)\n                valid",
            "            mbarrier.arrive(p_full.index(st), count=1)\n", "            mbarrier.arrive(p_full.index(st), count=1)\n            tick(lengths, g, 1, 4)\n",
            "            mbarrier.wait(p_full.index(st), (g // 2) & 1)\n", "            tick(lengths, g, 2, 0)\n            mbarrier.wait(p_full.index(st), (g // 2) & 1)\n            tick(lengths, g, 2, 1)\n",
            "            mbarrier.arrive(empty.index(st), count=1, pred=SPLIT | (j + 1 < count))\n", "            mbarrier.arrive(empty.index(st), count=1, pred=SPLIT | (j + 1 < count))\n            tick(lengths, g, 2, 2)\n",
            "        mbarrier.wait(inv_full, it & 1)\n", "        mbarrier.wait(inv_full, it & 1)\n        tick(lengths, it, 3, 0)\n", "        if following < item_stop:\n            # all scores", "        tick(lengths, it, 3, 1)\n        if following < item_stop:\n            # all scores",
            "        if not SPLIT:\n            if count > 0:\n                copy_out(klb", "        tick(lengths, it, 3, 2)\n        if not SPLIT:\n            if count > 0:\n                copy_out(klb",
            "            mbarrier.wait(full.index(g0 % 2), (g0 // 2) & 1)\n", "            tick(lengths, it, 3, 4)\n            mbarrier.wait(full.index(g0 % 2), (g0 // 2) & 1)\n            tick(lengths, it, 3, 5)\n",
            "        inverse.store(inv)\n", "        inverse.store(inv)\n        tick(lengths, it, 3, 6)\n"],
    "norescale": ["ol = rescale(ol, factors.index(st).load(gl.SliceLayout(1, OL)), OL, 256, SLACK)", "", "om = rescale(om, factors.index(st).load(gl.SliceLayout(1, OM)), OM, 128, SLACK)", ""],
}


def module(family, layout=None, patch=()):
    os.makedirs(FOLDER, exist_ok=True)
    context = dict(arch="sm90", template_hash="check", triton_range=("3.6", "4.0"))
    if layout:
        context |= dataclasses.asdict(LAYOUTS[layout]) | {"layout": layout}
    text = env.get_template(f"{family}.py.jinja").render(**context)
    for p in patch:
        for a, b in zip(PATCHES[p][::2], PATCHES[p][1::2]):
            assert a in text, (p, a)
            text = text.replace(a, b)
    layout = "_".join([str(layout), *patch])
    path = f"{FOLDER}/{family}_{layout}.py"
    if not os.path.exists(path) or open(path).read() != text:
        open(path + f".{os.getpid()}", "w").write(text)
        os.replace(path + f".{os.getpid()}", path)
    spec = importlib.util.spec_from_file_location(f"{family}_{layout}", path)
    m = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = m
    spec.loader.exec_module(m)
    return m


_modules = {}
def modules(layout, patch=()):
    if (layout, patch) not in _modules:
        _modules[layout, patch] = Modules(module("sm90_ws_fp8", layout, patch), module("combine"))
    return _modules[layout, patch]


def plan_of(call, over, splits, exact):
    extra = call.extra
    return Plan(config=Config(tunables=tuple((k, v) for k, v in (BASE | over).items() if k != "patch"), num_warps=4, num_stages=1), family=FAMILIES["sm90_ws_fp8"], heads=0, topk=0, extra_topk=0,
                page=call.main.page if exact else 0, extra_page=extra.page if exact and extra else 0, dual=extra is not None, splits=splits)


def bound(inputs, over, splits, exact=True, **flags):
    call = build_call(**inputs.kwargs(), **flags)
    assert call.aligned, "not aligned"
    return call, plan_of(call, over, splits, exact)


def run(call, plan, workspace=None, patch=()):
    launch(call, plan, modules(call.layout.name, patch), workspace)


# ---- checks: (name, case, splits, overrides, page sizes as constants)
C = CaseSpec
CHECKS = [
    ("v32 h128 one", C("v32", 128, 512, tokens=5, slots=2048, sink="near"), 1, ONE, True),
    ("v32 h100 topk 333 page 7 bf16 one", C("v32", 100, 333, page=7, tokens=9, slots=1000, scale_rule="arbitrary", sink="mixed"), 1, ONE | dict(latent="bf16"), False),
    ("v32 h64 split16 one8", C("v32", 64, 2048, tokens=3, slots=4096, lengths="random"), 16, NW8ONE, True),
    ("v32 h64 T1000 one", C("v32", 64, 150, tokens=1000, slots=600), 1, ONE, True),
    ("v4 h64 dual 128+512 page 64+3 one", C("v4", 64, 128, page=64, tokens=300, slots=512, extra_topk=512, extra_page=3, extra_slots=2048, sink="near"), 1, ONE, True),
]


def check(name, case, splits, over, exact):
    try:
        inputs = make_case(dataclasses.replace(case, q_pad=False), "cuda")
        out = torch.full((*inputs.q.shape[:-1], 512), float("nan"), dtype=torch.bfloat16, device="cuda")
        call, plan = bound(inputs, over, splits, exact, out=out, return_lse=True, return_max_logits=True)
        run(call, plan); torch.cuda.synchronize()
        first = call.out.clone(), call.lse.clone(), call.max_logits.clone()
        same = True
        for _ in range(3):
            for x in (call.out, call.lse, call.max_logits): x.fill_(float("nan"))
            run(call, plan); torch.cuda.synchronize()
            same &= all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip(first, (call.out, call.lse, call.max_logits)))
        r = compare(attention_reference(inputs), tolerance_for(case), call.out, call.lse, call.max_logits)
        ok = bool(r.ok) and same
        print(f"{'ok ' if ok else 'BAD'} {name}: {'' if r.ok else r.sentence} out {r.max_abs:.1e} repeatable {same}", flush=True)
        return ok
    except Exception as e:
        print(f"BAD {name}: {type(e).__name__} {str(e)[:300]}", flush=True)
        return False


# ---- times: (name, spec, splits to try, variants)
def S(layout, heads, topk, page, tokens, extra_topk=0, extra_page=0):
    return KernelSpec("sm90", layout, heads, topk, page, tokens, extra_topk, extra_page)
V32 = ["base", "p128", "one", "one8", "one-grid", "bf16one", "bf16one8", "p128-late", "one-late", "p128-unmask", "one-unmask", "p128-noscale", "one-noscale", "p128-noload", "one-noload", "p128-noload-late",
       "p128-noload-noconv", "p128-noload-nopv", "one-noconv", "one-nopv", "one-norescale"]
V4 = ["base", "p128", "one", "one8", "bf16one", "one-late"]
TIMES = [
    ("v32 h128 t128", S("v32", 128, 2048, 64, 128), [1], V32),
    ("v32 h64 t128", S("v32", 64, 2048, 64, 128), [1], ["p128", "one", "one8", "one-late", "one-noload"]),
    ("v32 h128 t16", S("v32", 128, 2048, 64, 16), [4], ["p128", "one", "one8"]),
    ("v32 h128 t1", S("v32", 128, 2048, 64, 1), [32], ["p128", "one"]),
    ("v4 h64 128+512 t256", S("v4", 64, 128, 256, 256, 512, 64), [1], V4 + ["one-nopv", "one-noconv"]),
    ("v4 h64 128+512 t64", S("v4", 64, 128, 256, 64, 512, 64), [1, 2], ["p128", "one"]),
    ("v4 h128 128+1024 t128", S("v4", 128, 128, 256, 128, 1024, 64), [1], ["p128", "one", "one8"]),
]


def graph_us(fn, sets, samples=7):
    for i in range(sets): fn(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(sets): fn(i)
    a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    got = []
    for i in range(samples + 1):
        a.record(); graph.replay(); b.record(); b.synchronize()
        got.append(a.elapsed_time(b) * 1e3 / sets)
    return sorted(got[1:])[samples // 2]


def timed(name, spec, splits_list, names):
    sets = max(2, min(48, -(-(240 << 20) // spec.gathered_bytes())))
    inputs = tuning_inputs(spec, spec.tokens, "cuda", sets)
    line = []
    for splits in splits_list:
        for v in names:
            try:
                bounds = [bound(x, VARIANTS[v], splits) for x in inputs]
                rows = spec.tokens * splits * spec.heads
                ws = torch.empty(rows * (2048 + 8), dtype=torch.uint8, device="cuda") if splits > 1 else None
                us = graph_us(lambda i: run(*bounds[i], ws, VARIANTS[v].get("patch", ())), sets)
                line.append(f"{v}{'' if splits == 1 else '/s%d' % splits} {us:.1f}")
            except Exception as e:
                line.append(f"{v} {type(e).__name__} {str(e)[:100]}")
    print(f"time {name}: " + "  ".join(line) + f"   [{time.time()-T0:.0f} s]", flush=True)


def trial(tokens, heads, cfgs, flush=True):
    """The kernel of the happy-path study on the same inputs: one split, power-of-two widths, no lengths."""
    spec = S("v32", heads, 2048, 64, tokens)
    sets = max(2, min(48, -(-(240 << 20) // spec.gathered_bytes())))
    inputs = tuning_inputs(spec, tokens, "cuda", sets)
    m = trial_module()
    rows = [inputs[0].kv.view(torch.uint8).reshape(-1).view(torch.int32)] * sets
    out = torch.empty(tokens, heads, 512, dtype=torch.bfloat16, device="cuda")
    pl = torch.empty(tokens, heads, device="cuda")
    line = []
    for name, cfg in cfgs:
        try:
            f = lambda i: m.decode_many[(tokens * heads // 64,)](inputs[i].q.reshape(-1, 576), rows[i], inputs[i].indices.reshape(tokens, -1), out, pl, 576 ** -0.5 * 1.4426950408889634, 2048, 1, heads, num_warps=4, **cfg)
            line.append(f"{name} {graph_us(f, sets):.1f}")
        except Exception as e:
            line.append(f"{name} {type(e).__name__} {str(e)[:200]}")
    print(f"trial v32 h{heads} t{tokens}: " + "  ".join(line) + f"   [{time.time()-T0:.0f} s]", flush=True)


def clocks(name, spec, v, lo, hi):
    """Mean cycles between the readings of each partition, over tiles lo..hi and all programs."""
    try:
        inputs = tuning_inputs(spec, spec.tokens, "cuda", 2)
        over = VARIANTS[v] | dict(patch=VARIANTS[v].get("patch", ()) + ("clk",))
        buf = torch.zeros(132 * 2048, dtype=torch.int32, device="cuda")
        for x in inputs:
            call, plan = bound(x, over, 1)
            args = list(attention_args(call, _scratch_tensors(call, plan, None), plan))
            args[3] = buf
            k = modules(spec.layout, over["patch"]).attention.attention_kernel
            k[plan.grid(call)](*args, **plan.constants, **plan.options)
        torch.cuda.synchronize()
        b = buf.view(132, 4, 64, 8)[:100].long()
        d = lambda x, y: ((b[:, y[0], lo + y[2]:hi + y[2], y[1]] - b[:, x[0], lo + x[2]:hi + x[2], x[1]]) & 0xFFFFFFFF).double().mean().item()
        names = dict(period=((0, 1, 0), (0, 1, 1)), prod_wait=((0, 0, 0), (0, 1, 0)), p0=((0, 1, 0), (0, 2, 0)), conv=((0, 1, 0), (0, 3 if over.get("rp", 32) == 32 else 2, 0)), to_arrive=((0, 1, 0), (0, 4, 0)), resolve=((0, 4, 0), (0, 5, 0)),
                     loop=((0, 5, 0), (0, 0, 1)), sm_wait_full=((1, 0, 0), (1, 1, 0)), sm_own_pv=((1, 1, 0), (1, 2, 0)), sm_scores=((1, 2, 0), (1, 3, 0)), sm_softmax=((1, 3, 0), (1, 4, 1)), sm_issue=((1, 4, 0), (1, 0, 0)),
                     val_wait=((2, 0, 0), (2, 1, 0)), val_work=((2, 1, 0), (2, 2, 0)), full_to_p=((0, 4, 1), (1, 4, 1)), p_to_free=((1, 4, 0), (2, 2, 0)))
        e = lambda i, x, y: ((b[:, 3, i, y] - b[:, 3, i, x]) & 0xFFFFFFFF).double().mean().item()
        n = spec.tokens * 0 + -(-spec.topk // 64) + -(-spec.extra_topk // 64)
        f = lambda x, y: ((b[(slice(None), *y)] - b[(slice(None), *x)]) & 0xFFFFFFFF).double().mean().item()
        print(f"clk {name} {v}: " + " ".join(f"{k} {d(*xy):.0f}" for k, xy in names.items()) + f" | item: inv->staged {e(0, 0, 1):.0f} loadq {e(0, 1, 2):.0f} first full wait {e(0, 4, 5):.0f} {e(1, 4, 5):.0f} last P->inv {f((1, n - 1, 4), (3, 0, 6)):.0f} inv->first full of next {f((3, 0, 6), (3, 1, 5)):.0f} first full->P {f((3, 1, 5), (1, n, 4)):.0f} item period {f((1, 1, 4), (1, n + 1, 4)):.0f}", flush=True)
    except Exception as ex:
        print(f"clk {name} {v}: {type(ex).__name__} {str(ex)[:300]}", flush=True)


def trial_module():
    if "trial" not in _modules:
        spec = importlib.util.spec_from_file_location("trial_many", ".gpu/trial_decode_many.py")
        _modules["trial"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(_modules["trial"])
    return _modules["trial"]


def warm(job):
    kind, item, splits, over, exact = job
    t = time.time()
    try:
        if kind == "trial":
            q, kv, i, o, p = (torch.empty(1 << 16, dtype=d, device="cuda") for d in (torch.bfloat16, torch.int32, torch.int32, torch.bfloat16, torch.float32))
            k = trial_module().decode_many.warmup(q, kv, i, o, p, 0.1, 2048, 1, splits, grid=(1,), num_warps=4, **over)
            k._init_handles()
            return "trial ok"
        if kind == "check":
            inputs = make_case(dataclasses.replace(item, q_pad=False, tokens=min(item.tokens, 4), slots=min(item.slots, 256)), "cuda")
        else:
            inputs = tuning_inputs(item, item.tokens, "cuda", 1, pool_bytes=1 << 20)[0]
        call, plan = bound(inputs, over, splits, exact, return_lse=kind == "check", return_max_logits=kind == "check")
        scratch = _scratch_tensors(call, plan, None)
        m = modules(call.layout.name, over.get("patch", ()))
        k = m.attention.attention_kernel.warmup(*attention_args(call, scratch, plan), grid=(1,), **plan.constants, **plan.options)
        if splits > 1:
            m.combine.combine_kernel.warmup(*combine_args(call, plan, scratch), grid=(1,), **combine_constants(plan, call))
        k._init_handles()
        return f"{item.layout} split {splits} {over}: {time.time()-t:.0f} s, shared {k.metadata.shared} regs {k.n_regs} spills {k.n_spills}"
    except Exception as e:
        return f"{item.layout} split {splits} {over}: FAILED {type(e).__name__} {str(e)[-300:]}"


if __name__ == "__main__":
    what = [a for a in sys.argv[1:] if "=" not in a] or ["check", "trial", "clk", "time"]
    only = [a[5:] for a in sys.argv[1:] if a.startswith("only=")]
    picked = lambda name: not only or any(o in name for o in only)
    jobs, seen = [], set()
    if "time" in what:
        for name, spec, splits_list, names in TIMES:
            for s in splits_list[:1]:
                for v in names:
                    key = (spec.layout, s > 1, v)
                    if picked(name) and key not in seen:
                        seen.add(key); jobs.append(("time", spec, s, VARIANTS[v], True))
    if "trial" in what:
        TR = [("4", trial_module().CFG4), ("8", trial_module().CFG8), ("4 idx first", trial_module().CFG4 | dict(IDX_FIRST=1))]
        jobs += [("trial", S("v32", h, 2048, 64, 128), h, c, True) for h in (128, 64) for n, c in TR]
    CLOCKS = [("v32 h128 t128", S("v32", 128, 2048, 64, 128), "p128", 8, 24), ("v32 h128 t128", S("v32", 128, 2048, 64, 128), "one", 8, 24), ("v4 h64 t256", S("v4", 64, 128, 256, 256, 512, 64), "one", 3, 8)]
    if "clk" in what:
        jobs += [("time", c[1], 1, VARIANTS[c[2]] | dict(patch=VARIANTS[c[2]].get("patch", ()) + ("clk",)), True) for c in CLOCKS]
    if "check" in what:
        jobs += [("check", c, s, o, e) for n, c, s, o, e in CHECKS if picked(n)]
    with ProcessPoolExecutor(int(os.environ.get("WS8_PROCS", 14)), mp_context=get_context("spawn")) as pool:
        for line in pool.map(warm, jobs):
            if "FAILED" in line or os.environ.get("VERBOSE"): print("compiled", line, flush=True)
    print(f"== compiled {len(jobs)}, {time.time()-T0:.0f} s", flush=True)
    good = [check(*c) for c in CHECKS if picked(c[0])] if "check" in what else []
    if good: print(f"== {sum(good)} of {len(good)} checks passed, {time.time()-T0:.0f} s", flush=True)
    if "trial" in what:
        trial(128, 128, TR); trial(128, 64, TR)
    if "clk" in what:
        for c in CLOCKS: clocks(*c)
    if "time" in what:
        for t in TIMES:
            if picked(t[0]): timed(*t)
    print(f"== done, {time.time()-T0:.0f} s")
    sys.exit(0 if all(good) else 1)
