"""`python -m kgen.verify_child`: verify the emitted package in a process of its own.

A CUDA error ends every further call of its process, so whoever starts this starts it again with the same --resume file
when it ends with RESTART or by a signal; `kgen verify` does. The exit code says what was found: 0 nothing, 1 failed
cases, 2 the results file cannot be read or written, 4 the budget is spent and cases are left, 75 go on in a new process,
130 interrupted.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kgen.errors import KgenError

if TYPE_CHECKING:  # this module's exit codes are imported by the command line, which must not wait for torch
    from torch import Tensor

    from kgen.check import Inputs
    from kgen.verify import Attention, Results
    from kgen.verify_cases import VerifyCase

FAILED, REFUSED, UNFINISHED, RESTART, INTERRUPTED = 1, 2, 4, 75, 130


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m kgen.verify_child", description=__doc__)
    made.add_argument("--suite", choices=("core", "full", "sanitizer"), default="core")
    made.add_argument("--resume", type=Path, metavar="FILE", help="results file; what it holds is not run again")
    made.add_argument("--budget", type=float, metavar="S", help="seconds from now after which no case is started")
    made.add_argument("--repeat", type=int, default=1, metavar="N", help="run every case N times; bits must agree")
    made.add_argument("--rows", type=int, metavar="N", help="compare at most N rows of a case")
    made.add_argument("--shard", type=shard, default=(0, 1), metavar="I/N", help="the I-th of N shares (from 0)")
    made.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is one")
    made.add_argument("--package", default="generated", help="the emitted package")
    made.add_argument("--limit", type=int, metavar="N", help="only the first N cases")
    made.add_argument("--json", type=Path, metavar="OUT", help="write the summary there")
    made.add_argument("--parent", type=int, metavar="PID", help="be killed when this process, which started us, ends")
    return made


def shard(text: str) -> tuple[int, int]:
    """(I, N) of "I/N"; ValueError unless 0 <= I < N."""
    part, parts = (int(number) for number in text.split("/"))
    if not 0 <= part < parts:
        raise ValueError(f"shard {text} is not I/N with I from 0 to N-1")
    return part, parts


def main(argv: Sequence[str] | None = None) -> int:
    begin = time.monotonic()  # a budget counts from here: the imports below take seconds
    args = parser().parse_args(argv)
    if args.parent is not None:
        from kgen.worker_child import die_with

        die_with(args.parent)
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # its way to say that Ctrl-C was pressed
    try:
        return _run(args, begin)
    except KeyboardInterrupt:
        return INTERRUPTED
    except KgenError as error:
        print(f"kgen.verify_child: {error}", file=sys.stderr, flush=True)
    except OSError as error:  # a full disk, say
        print(f"kgen.verify_child: {error.strerror or error}.", file=sys.stderr, flush=True)
    return REFUSED


def _run(args: argparse.Namespace, begin: float) -> int:
    import torch

    from kgen.verify import CaseResult, environment_here, verify

    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    part, parts = args.shard
    cases = cases_of_shard(args.suite, device, part, parts, args.package)[: args.limit]

    def tell(result: CaseResult) -> None:
        if not result.ok:
            print(f"FAILED {result.slug} ({result.kind}): {result.sentence}", file=sys.stderr, flush=True)

    summary = verify(
        cases,
        shipped_attention(args.package),
        device,
        resume_file=args.resume,
        budget_s=None if args.budget is None else round(args.budget - (time.monotonic() - begin), 1),
        repeat=args.repeat,
        rows_limit=args.rows,
        subject=subject_of(args.package, environment_here(device)),
        on_result=tell,
    )
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(summary.to_json(), indent=1) + "\n")
    for line in summary.lines():
        print(line)
    if summary.poisoned:
        return RESTART
    return FAILED if summary.failures else UNFINISHED if summary.left else 0


def cases_of_shard(suite: str, device: str, part: int, parts: int, package: str) -> list[VerifyCase]:
    """The cases of one of `parts` processes, in the order in which it runs them."""
    from kgen.verify_forms import formed_cases
    from kgen.verify_shards import kernels_here, shard_of

    cases = formed_cases(suite, device)
    return shard_of(cases, part, parts, kernels_here(cases, package, device))


# ---------------------------------------------------------------------------------------------- what is verified


def subject_of(package: str, environment: dict[str, Any]) -> str:
    """Fingerprint of the emitted package (what one arch runs of it), of what `kgen.check` compares with, of GPU, driver,
    Triton, torch. The model of Gluon and its protocol check are no part of it."""
    emitted = Path(str(importlib.import_module(package).__file__)).parent
    own = Path(__file__).parent
    files = [*emitted.glob("*.py"), *emitted.glob("compat/*.py"), *emitted.glob(f"{environment['arch']}/*.py")]
    digest = hashlib.sha256()
    checks = [path for path in own.glob("check/*.py") if not path.name.startswith("protocol")]
    for path in sorted([*files, *checks]):
        digest.update(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    for name in ("gpu", "cc", "driver", "triton", "torch"):
        digest.update(f"{name}={environment[name]}\0".encode())
    return digest.hexdigest()[:16]


def shipped_attention(package: str = "generated") -> Attention:
    """The emitted package: `sparse_mla` with lse in a buffer full of NaN; with the flag `facade` FlashMLA's interface,
    with `pad_heads` the same entry twice; with `stated` the range of the scales that the call reads is passed, too."""
    import torch

    from kgen.check.scales import selected_range

    dispatch = importlib.import_module(f"{package}.dispatch")

    def attention(inputs: Inputs, **flags: Any) -> Results:
        if flags.pop("stated", False):
            flags["scale_range"] = selected_range(inputs)
        if flags.pop("facade", False):
            return _through_flash_mla(package, inputs, flags.get("out"), flags.get("scale_range"))
        if to := flags.pop("pad_heads", 0):
            return _padded_as_native(package, inputs, to, flags)
        if flags.get("return_lse"):
            flags["lse"] = torch.full(inputs.q.shape[:-1], float("nan"), device=inputs.q.device)
        found = dispatch.sparse_mla(**inputs.kwargs(), **flags)
        results: list[Tensor] = list(found) if isinstance(found, tuple) else [found]
        out = results.pop(0)
        lse = results.pop(0) if flags.get("return_lse") else None
        return out, lse, results.pop(0) if flags.get("return_max_logits") else None

    return attention


def _through_flash_mla(
    package: str, inputs: Inputs, out: Tensor | None, scale_range: tuple[float, float] | None
) -> Results:
    """Shapes as FlashMLA's callers pass them: prefill [T, h, d] with indices [T, 1, topk], decode [b, s_q, h, d]."""
    facade = importlib.import_module(f"{package}.compat.flash_mla")
    q, indices, lengths = inputs.q, inputs.indices, inputs.topk_length
    if inputs.kv_layout == "bf16":
        if q.dim() == 4:
            q, indices = q.flatten(0, 1), indices.flatten(0, 1)
            out = None if out is None else out.flatten(0, 1)
            lengths = None if lengths is None else lengths.repeat_interleave(inputs.s_q)
        indices = indices if indices.dim() == 3 else indices[:, None]
        kv = inputs.kv[:, None]
        made = facade.flash_mla_sparse_fwd(q, kv, indices, inputs.sm_scale, 512, inputs.attn_sink, lengths, out=out)
        return made[0], made[2], made[1]

    def wide(tensor: Tensor | None, rank: int) -> Tensor | None:
        return tensor if tensor is None or tensor.dim() == rank else tensor[:, None]

    named = None if inputs.kv_layout in ("v32", "v4") else inputs.kv_layout
    found, lse = facade.flash_mla_with_kvcache(
        wide(q, 4), inputs.kv, None, None, 512, facade.get_mla_metadata()[0], None, inputs.sm_scale, False, True,
        wide(indices, 3), inputs.attn_sink, inputs.extra_kv, wide(inputs.extra_indices, 3), lengths,
        inputs.extra_topk_length, out=wide(out, 4), kv_layout=named, scale_range=scale_range,
    )  # fmt: skip
    return found, lse.transpose(1, 2), None


def _padded_as_native(package: str, inputs: Inputs, to: int, flags: dict[str, Any]) -> Results:
    """The native call and one with zero heads up to `to`, both by the entry of the native shape in its generic form."""
    from kgen.check import pad_heads
    from kgen.verify import same_bits

    validate, launch, lookup, target = (
        importlib.import_module(f"{package}.{name}") for name in ("validate", "launch", "lookup", "target")
    )
    call = validate.build_call(**inputs.kwargs(), **flags)
    here = target.target_of(inputs.q.device)
    entry = lookup.serving_of(call, here).choice.entry
    flags.pop("out", None)
    padded = validate.build_call(**pad_heads(inputs, to).kwargs(), **flags)
    for each in (call, padded):
        launch.run(each, here.arch, entry, False, None, package)
    heads = inputs.heads
    pairs = {
        "out": (call.out, padded.out[..., :heads, :]),
        "lse": (call.lse, padded.lse[..., :heads]),
        "max_logits": (call.max_logits, padded.max_logits[..., :heads]),
    }
    changed = [name for name, (native, real) in pairs.items() if not same_bits(native, real)]
    if changed:
        raise ValueError(f"Heads padded from {heads} to {to} change bits of {' and '.join(changed)} on the real heads.")
    return call.out, call.lse, call.max_logits


if __name__ == "__main__":
    sys.exit(main())
