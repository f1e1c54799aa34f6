"""A compile process: reads ProbeJobs as JSON lines on stdin, answers each with a ResourceUse (or an error sentence) as JSON.

Run as `python -m kgen.compile_child` by kgen.build. Needs no GPU.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


def main() -> None:
    # what the compiler prints must not mix with our answers
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        reply = _compile(json.loads(line))
        answers.write(json.dumps(reply) + "\n")
        answers.flush()


def _compile(fields: dict[str, Any]) -> dict[str, Any]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from kgen.build import ProbeJob, signature_of
    from kgen.render import load_module
    from kgen.runtime.families import FAMILIES

    fields["constants"] = tuple((name, value) for name, value in fields["constants"])
    job = ProbeJob(**fields)
    try:
        kernel = getattr(load_module(job.family, job.layout, job.arch, job.chunk), job.kernel)
        signature, attrs = signature_of(job, kernel.arg_names, kernel.do_not_specialize)
        constants: dict[str, Any] = {name: 1 for name in ("lse_stride_h", "max_stride_h") if name in kernel.arg_names}
        constants |= dict(job.constants)
        family = FAMILIES.get(job.family)
        gluon = family is not None and family.gluon
        source_type = _gluon_source() if gluon else ASTSource
        source = source_type(fn=kernel, signature=signature, constexprs=constants, attrs=attrs)
        options: dict[str, Any] = {"num_warps": job.num_warps}
        if not gluon:
            options["num_stages"] = job.num_stages
        if job.maxnreg is not None:
            options["maxnreg"] = job.maxnreg
        if family is not None and family.ctas > 1:
            options["num_ctas"] = family.ctas
        compiled = triton.compile(source, target=GPUTarget("cuda", job.cc, 32), options=options)
        return _resources(compiled, job.num_warps)
    except Exception as error:  # whatever the compiler raises is this job's result
        cause: BaseException = error
        while cause.__cause__ is not None:  # Triton wraps the reason once per call level
            cause = cause.__cause__
        text = " ".join(str(cause).split()) or " ".join(str(error).split()) or "no message"
        return {"error": f"{type(error).__name__}: {text[-400:]}"}  # the end says what, the start repeats the source


def _gluon_source() -> Any:
    from triton.experimental.gluon._runtime import GluonASTSource

    return GluonASTSource


def _resources(compiled: Any, num_warps: int) -> dict[str, Any]:
    cubin: bytes = compiled.asm["cubin"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        text = subprocess.run([_cuobjdump(), "-res-usage", str(path)], capture_output=True, text=True).stdout
    usage = {name: int(value) for name, value in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", text)}
    return {
        "shared": int(compiled.metadata.shared),
        "registers": usage["REG"],
        "spills": usage["STACK"] + usage["LOCAL"],
        "tmem": int(getattr(compiled.metadata, "tmem_size", 0) or 0),
        "mma": mma_of(compiled.asm["ptx"]),
        "cubin_bytes": len(cubin),
        "warps": all_warps(compiled.metadata, num_warps),
    }


def all_warps(metadata: Any, num_warps: int) -> int | None:
    """Warps that a program really runs, where Triton added some to the `num_warps` asked for (it counts them in the metadata
    of a warp-specialised kernel); else None."""
    return int(metadata.num_warps) if metadata.num_warps != num_warps else None


def mma_of(ptx: str) -> str:
    """The matrix instruction family that the PTX uses."""
    for family in ("wgmma", "tcgen05", "mma.sync"):
        if f"{family}.mma_async" in ptx or f"{family}.mma" in ptx or (family == "mma.sync" and family in ptx):
            return family
    return "none"


def _cuobjdump() -> str:
    """Triton ships it; a CUDA toolkit on the PATH does as well."""
    import triton

    own = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    path = str(own) if own.exists() else shutil.which("cuobjdump")
    if path is None:
        raise FileNotFoundError("cuobjdump is neither in the triton package nor on the PATH; install the CUDA toolkit.")
    return path


if __name__ == "__main__":
    main()
