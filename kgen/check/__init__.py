"""What decides whether a kernel is right: reference, inputs, comparison, and proof that the comparison can see."""

from .cases import EDGE_CASES, CaseSpec, Inputs, core_edges, make_case, tuning_inputs
from .compare import TOLERANCES, Report, Tolerance, compare, deepinfer_rule, narrowed, tolerance_for
from .reference import Reference, attention_reference
from .shards import merge_shards, pad_heads, pad_topk, split_row

__all__ = [
    "EDGE_CASES",
    "TOLERANCES",
    "CaseSpec",
    "Inputs",
    "Reference",
    "Report",
    "Tolerance",
    "attention_reference",
    "compare",
    "core_edges",
    "deepinfer_rule",
    "make_case",
    "merge_shards",
    "narrowed",
    "pad_heads",
    "pad_topk",
    "split_row",
    "tolerance_for",
    "tuning_inputs",
]
