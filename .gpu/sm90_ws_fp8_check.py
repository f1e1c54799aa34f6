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
BASE = dict(block_h=64, block_k=64, latent="fp16", persistent=True, nw=4, rp=32, r_value=224, r_prod=112, n_value=256, slack=8, prefetch=False)
NW8 = dict(nw=8, n_value=128, r_prod=72)
ONE = dict(rp=64, r_prod=120)  # one register set for a whole tile
VARIANTS = {"base": {}, "p120": dict(r_prod=120), "p128": dict(r_prod=128), "one": ONE, "one8": NW8 | dict(rp=64), "nw8": NW8, "nw8v4": NW8 | dict(r_prod=64), "pf": dict(prefetch=True), "one-pf": ONE | dict(prefetch=True),
            "bf16": dict(latent="bf16"), "bf16-16": dict(latent="bf16", rp=16), "bf16nw8": NW8 | dict(latent="bf16"), "bf16-16x8": NW8 | dict(latent="bf16", rp=16), "bf16one": ONE | dict(latent="bf16")}
for k in ("late", "noload", "noconv", "nopv"):
    VARIANTS["base-" + k] = dict(patch=(k,))
    VARIANTS["one-" + k] = ONE | dict(patch=(k,))
VARIANTS["base-grid"] = dict(persistent=False)
VARIANTS["one-grid"] = ONE | dict(persistent=False)
VARIANTS["r1-p128"] = dict(r_prod=128, patch=("r1",))  # the first round's text
VARIANTS["r1-one"] = ONE | dict(patch=("r1",))
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
    "noload": ["return gl.load(words + (row + col), mask=row >= 0, other=0)", "return (row + col).to(gl.int32) & 0x37373737"],
    "noconv": ["lo, hi = dequantise_fp16(raw, gl.expand_dims(gl.expand_dims(half, 2), 3))", "lo = raw & 0x37373737\n        hi = lo"],
    "nopv": ["yl = warpgroup_mma(kp.index(st), kl.index(st), ol, is_async=True)", "", "ym = warpgroup_mma(kp.index(st), kr.index(st).slice(0, 128, dim=1), om, is_async=True)", "",
             "ol, om = warpgroup_mma_wait(0, deps=[yl, ym])", ""],
}


def module(family, layout=None, patch=()):
    os.makedirs(FOLDER, exist_ok=True)
    context = dict(arch="sm90", template_hash="check", triton_range=("3.6", "4.0"))
    if layout:
        context |= dataclasses.asdict(LAYOUTS[layout]) | {"layout": layout}
    old = "r1" in patch
    text = (env.from_string(open(".gpu/ws8_round1.py.jinja").read()) if old else env.get_template(f"{family}.py.jinja")).render(**context)
    patch = tuple(p for p in patch if p != "r1")
    for p in patch:
        for a, b in zip(PATCHES[p][::2], PATCHES[p][1::2]):
            assert a in text, (p, a)
            text = text.replace(a, b)
    layout = "_".join([str(layout), *patch] + ["r1"] * old)
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
    ("v32 h128 base", C("v32", 128, 512, tokens=5, slots=2048, sink="near"), 1, {}, True),
    ("v32 h100 topk 333 page 7 bf16", C("v32", 100, 333, page=7, tokens=9, slots=1000, scale_rule="arbitrary", sink="mixed"), 1, dict(latent="bf16"), False),
    ("v32 h64 split16 one8", C("v32", 64, 2048, tokens=3, slots=4096, lengths="random"), 16, NW8 | dict(rp=64), True),
    ("v32 h64 T1000 random lengths one", C("v32", 64, 150, tokens=1000, slots=600, lengths="random"), 1, ONE, True),
    ("v32 h64 T300 split 3 persistent", C("v32", 64, 333, tokens=300, slots=600, lengths="random"), 3, {}, True),
    ("v4 h64 dual 128+512 page 64+3 one", C("v4", 64, 128, page=64, tokens=300, slots=512, extra_topk=512, extra_page=3, extra_slots=2048, sink="near"), 1, ONE, True),
    ("v4 h70 T400 random lengths base", C("v4", 70, 200, tokens=400, slots=512, lengths="random"), 1, {}, False),
    ("v4 h64 dual bf16 pf", C("v4", 64, 128, page=64, tokens=9, slots=512, extra_topk=300, extra_page=64, extra_slots=2048), 1, dict(latent="bf16", prefetch=True), True),
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
TIMES = [
    ("v32 h128 t128", S("v32", 128, 2048, 64, 128), [1], ["r1-p128", "r1-one", "base", "p120", "p128", "one", "nw8", "base-grid", "one-grid", "pf", "one-pf", "base-late", "one-late", "base-noload", "one-noload", "one-noconv", "one-nopv", "bf16", "bf16-16", "bf16nw8", "bf16-16x8", "bf16one"]),
    ("v32 h64 t128", S("v32", 64, 2048, 64, 128), [1], ["r1-one", "base", "one", "one-pf"]),
    ("v32 h128 t16", S("v32", 128, 2048, 64, 16), [4], ["r1-one", "base", "one"]),
    ("v32 h128 t1", S("v32", 128, 2048, 64, 1), [32], ["r1-one", "base", "one"]),
    ("v4 h64 128+512 t256", S("v4", 64, 128, 256, 256, 512, 64), [1], ["r1-one", "base", "one", "nw8v4", "pf", "one-pf", "one-late", "one-noload", "one-noconv", "one-nopv", "bf16", "bf16nw8"]),
    ("v4 h64 128+512 t64", S("v4", 64, 128, 256, 64, 512, 64), [2], ["r1-one", "base", "one"]),
    ("v4 h128 128+1024 t128", S("v4", 128, 128, 256, 128, 1024, 64), [1], ["r1-one", "base", "one", "one-pf"]),
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
    what = [a for a in sys.argv[1:] if "=" not in a] or ["check", "trial", "time"]
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
        TR = [("4 idx first", trial_module().CFG4 | dict(IDX_FIRST=1)), ("8", trial_module().CFG8)]
        jobs += [("trial", S("v32", h, 2048, 64, 128), h, c, True) for h in (128, 64) for n, c in TR]
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
    if "time" in what:
        for t in TIMES:
            if picked(t[0]): timed(*t)
    print(f"== done, {time.time()-T0:.0f} s")
    sys.exit(0 if all(good) else 1)
