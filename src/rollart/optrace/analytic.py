"""A trace from the numbers of a model's shape, without a model: what closed forms say a rank runs.

Owns the blocks of a decoder as operators: attention, dense and expert feed-forward, state-space layers, embedding, head.
Invariant: the products are those of `ModelShape.matrices()`, the passes and the bytes kept those of `perf.train_layers` and
`perf.memory`, so totals agree with the closed forms to rounding. Why: it answers at once and without torch, and a captured
trace is judged by it. Tensor parallelism is in the trace; everything else is derived (`transforms.derived`).
"""

from __future__ import annotations

from dataclasses import replace

from rollart.core.errors import ConfigError
from rollart.optrace.analytic_parts import Building, Numbers, product_of
from rollart.optrace.ops import Op, Part, Trace
from rollart.optrace.rewriting import communication
from rollart.perf.memory import SCORE_BYTES
from rollart.perf.operators import FLASH_BACKWARD_FLOPS
from rollart.perf.shapes import Kind, ModelShape
from rollart.perf.train_layers import LOSS_BYTES, TrainingLaw
from rollart.perf.train_plan import Framework, TrainingPlan

FORWARD_LOSS = 0.4
"""Share of a loss's bytes that its forward pass moves, as in `perf.train_layers.head_cost`."""
KEPT_LOGIT_BYTES = {"passes": 6.0, "torch": 4.0, "fused": 2.0}
"""Per logit, for the backward of the loss; with the gradient of LOGIT_GRADIENT_BYTES they are what `perf.memory` counts."""
LOGIT_GRADIENT_BYTES = {"passes": 4.0, "torch": 4.0, "fused": 2.0}
SOFTMAX_BYTES, DROPOUT_BYTES = (4.0, 6.0), (5.0, 5.0)
"""Per score, forward and backward (`perf.operators.score_attention_s`)."""
SCORE_KEPT = (2.0, SCORE_BYTES - 2.0)
"""Per score: the softmax's result, and the dropout's with its mask."""
LOSS_REDUCTIONS = 3
"""A vocabulary-parallel loss sums over ranks the largest logit, the exponentials and the right token's logit."""


def analytic_trace(
    shape: ModelShape, plan: TrainingPlan, framework: Framework, law: TrainingLaw | None = None
) -> Trace:
    """The tensor-parallel rank of `plan` that runs `shape`, built from numbers; `law`: what unfused passes move more."""
    base = TrainingPlan(
        devices=plan.tp, micro_batch=plan.micro_batch, global_batch=plan.global_batch, sequence=plan.sequence, tp=plan.tp,
        dtype="bf16" if plan.dtype in ("fp8", "fp4") else plan.dtype,
    )  # fmt: skip
    of = Numbers(
        shape=shape, plan=base, framework=framework, law=law or TrainingLaw(),
        split=1 if plan.sequence_parallel else plan.tp,
    )  # fmt: skip
    layers = layer_kinds(shape)
    parts = {name: _layer(name, of) for name in dict.fromkeys(layers)}
    parts["embedding"], parts["head"] = _embedding(of), _head(of)
    return Trace(
        model=shape.name, plan=base, parts=parts, layers=layers,
        notes=("built from the numbers of the shape; no model was run",),
    )  # fmt: skip


def layer_kinds(shape: ModelShape) -> tuple[str, ...]:
    """The part of each layer: blocks joined by "+", as `attention+dense` (experts come after dense layers).

    Raises `ConfigError` for a shape whose counts say neither a usual transformer nor a hybrid of single blocks.
    """
    counts = {
        "attention": shape.attention_layers, "dense": shape.dense_layers, "moe": shape.moe_layers,
        "mamba": shape.mamba_layers,
    }  # fmt: skip
    if shape.attention_layers == shape.layers == shape.dense_layers + shape.moe_layers and not shape.mamba_layers:
        attention = _spread({"windowed attention": shape.windowed_layers,
                             "attention": shape.layers - shape.windowed_layers})  # fmt: skip
        feed = ["dense"] * shape.dense_layers + ["moe"] * shape.moe_layers
        return tuple(f"{one}+{other}" for one, other in zip(attention, feed, strict=True))
    if sum(counts.values()) == shape.layers:
        return tuple(_spread(counts))
    raise ConfigError(
        f"model {shape.name}: {counts} blocks in {shape.layers} layers; capture the model itself (module:function)"
    )


def _spread(counts: dict[str, int]) -> list[str]:
    """Names, each as often as counted, evenly interleaved."""
    places = [((at + 0.5) / count, name) for name, count in counts.items() for at in range(count)]
    return [name for _, name in sorted(places)]


# ---- blocks


def _layer(name: str, of: Numbers) -> Part:
    part = Building(of=of)
    for block in name.split("+"):
        if block.endswith("attention"):
            _attention(part, of, windowed=block.startswith("windowed"))
        elif block == "dense":
            _dense(part, of)
        elif block == "moe":
            _experts(part, of)
        else:
            _mamba(part, of)
    return part.done(name, of.hidden_bytes)


def _hidden_shape(of: Numbers) -> tuple[int, ...]:
    return (of.plan.micro_batch, of.plan.sequence, of.shape.hidden)


def _norm(part: Building, of: Numbers) -> None:
    elements = of.tokens * of.shape.hidden
    part.passes("norm", _hidden_shape(of), of.moved(4.0 * elements), written=of.hidden_bytes, saved=of.hidden_bytes)


def _add(part: Building, of: Numbers) -> None:
    """Residual sum, with the dropout before it."""
    elements = of.tokens * of.shape.hidden
    mask = 1.0 if of.framework.dropout else 0.0
    part.passes(
        "add", _hidden_shape(of), of.moved((6.0 + mask) * elements), written=of.hidden_bytes, residual=True,
        saved=of.hidden_bytes + mask * elements,
    )  # fmt: skip


def _attention(part: Building, of: Numbers, *, windowed: bool) -> None:
    shape, plan, tokens = of.shape, of.plan, of.tokens
    _norm(part, of)
    part.reduced_backward()
    width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim // plan.tp
    kept = of.width * tokens * width
    for matrix in of.matrices("qkv"):
        part.product(matrix, tokens, matrix.outputs // plan.tp, matrix.inputs)
    rotary = 4.0 * (shape.heads + shape.kv_heads) * shape.head_dim if shape.gated else 0.0
    moved = of.moved(tokens * (rotary + 4.0 * (shape.heads + 2 * shape.kv_heads) * shape.head_dim) / plan.tp)
    part.passes("rotary", (plan.micro_batch, plan.sequence, width), moved, written=kept, saved=kept)
    heads = max(1, shape.heads // plan.tp) * plan.micro_batch
    keys = min(2 * shape.window, plan.sequence) if windowed else plan.sequence
    if of.framework.attention == "scores":
        _scores(part, of, heads)
    else:
        _flash(part, of, heads, keys)
    (out,) = of.matrices("attention_out")
    part.product(out, tokens, out.outputs, out.inputs // plan.tp)
    part.reduce()
    _add(part, of)


def _flash(part: Building, of: Numbers, heads: int, keys: int) -> None:
    shape, queries = of.shape, of.plan.sequence
    dims = shape.qk_dim + shape.v_dim
    kv_heads = max(1, shape.kv_heads * heads // shape.heads)
    made = of.width * queries * heads * shape.v_dim
    moved = of.width * dims * (float(queries) * heads + float(keys) * kv_heads)
    op = Op(
        id=0, name="derived.flash_attention", kind="attention", shape=(queries, keys, heads, dims), dtype=of.plan.dtype,
        flops=float(queries) * keys * heads * dims, moved_bytes=moved, written_bytes=made, saved_bytes=made,
    )  # fmt: skip
    part.forward.add(op, part.last())
    back = replace(
        op, name="derived.flash_attention_backward", kind="attention_backward", flops=FLASH_BACKWARD_FLOPS * op.flops,
        moved_bytes=2 * moved, written_bytes=moved - made, saved_bytes=0.0,
    )  # fmt: skip
    part.backward.append([back])


def _scores(part: Building, of: Numbers, heads: int) -> None:
    shape, plan, s = of.shape, of.plan, of.plan.sequence
    count = float(s) * s * heads
    scores, values = (
        product_of(s, s, shape.head_dim, heads, plan.dtype),
        product_of(s, shape.head_dim, s, heads, plan.dtype),
    )
    part.forward.add(scores, part.last())
    part.backward.append([values, product_of(s, shape.head_dim, s, heads, plan.dtype)])
    for at, name in enumerate(("softmax", "dropout")):
        moved, back = (SOFTMAX_BYTES, DROPOUT_BYTES)[at]
        part.passes(
            name, (plan.micro_batch, heads // plan.micro_batch, s, s), moved * count, written=2 * count,
            saved=SCORE_KEPT[at] * count, backward=back * count,
        )  # fmt: skip
    part.forward.add(replace(values, saved_bytes=of.width * s * heads * shape.head_dim), part.last())
    part.backward.append([scores, product_of(s, shape.head_dim, s, heads, plan.dtype)])


def _dense(part: Building, of: Numbers) -> None:
    _norm(part, of)
    part.reduced_backward()
    _feed(part, of, "ffn_in", "ffn_out", of.shape.ffn)
    part.reduce()
    _add(part, of)


def _feed(part: Building, of: Numbers, into: Kind, out: Kind, width: int) -> None:
    """A feed-forward block of `width`, split over the tensor-parallel ranks."""
    (first,), (second,) = of.matrices(into), of.matrices(out)
    ups, local, tokens = (2 if of.shape.gated else 1), width // of.plan.tp, of.tokens
    part.product(first, tokens, ups * local, first.inputs, saved=of.width * ups * local * tokens)
    part.passes(
        "activation", (of.plan.micro_batch, of.plan.sequence, local), of.moved(2.0 * (ups + 1) * local * tokens),
        written=of.width * local * tokens, saved=of.width * local * tokens,
    )  # fmt: skip
    part.product(second, tokens, second.outputs, local)


def _experts(part: Building, of: Numbers) -> None:
    shape, plan = of.shape, of.plan
    tokens = of.tokens // of.split
    ups, inside, routed = (2 if shape.gated else 1), shape.moe_latent or shape.hidden, tokens * shape.top_k
    _norm(part, of)
    (router,), (into,), (out,) = of.matrices("router"), of.matrices("expert_in"), of.matrices("expert_out")
    part.product(router, tokens, shape.experts, shape.hidden)
    latent = of.matrices("latent")
    if latent:
        part.product(latent[0], tokens, inside, shape.hidden)
    rows = max(1, routed // shape.experts)
    moved = of.moved(4.0 * routed * inside, moe=True)
    kept = of.width * routed * shape.hidden
    part.passes("permute", (routed, inside), moved, written=of.width * routed * inside, saved=kept)
    part.product(into, rows, ups * shape.moe_ffn, inside, shape.experts, of.width * ups * routed * shape.moe_ffn)
    part.passes(
        "activation", (routed, shape.moe_ffn), of.moved(2.0 * (ups + 1) * routed * shape.moe_ffn, moe=True),
        written=of.width * routed * shape.moe_ffn, saved=of.width * routed * shape.moe_ffn,
    )  # fmt: skip
    part.product(out, rows, inside, shape.moe_ffn, shape.experts)
    part.passes("permute", (routed, inside), moved, written=of.width * tokens * inside)
    if latent:
        part.product(latent[0], tokens, shape.hidden, inside)
    if shape.shared_experts:
        part.reduced_backward()
        _feed(part, of, "shared_in", "shared_out", shape.shared_experts * shape.shared_ffn)
        part.reduce()
    if of.split > 1:
        again = communication("all_gather", "tp", of.hidden_bytes, dtype=plan.dtype)
        part.forward.add(again, part.last())
        part.backward.append([again])
    _add(part, of)


def _mamba(part: Building, of: Numbers) -> None:
    shape, tp, tokens = of.shape, of.plan.tp, of.tokens
    (into,), (out,) = of.matrices("mamba_in"), of.matrices("mamba_out")
    inner = shape.mamba_inner // tp
    _norm(part, of)
    part.reduced_backward()
    part.product(into, tokens, into.outputs // tp, into.inputs, saved=6.0 * inner * tokens)
    part.passes(
        "scan", (of.plan.micro_batch, of.plan.sequence, 3 * inner),
        of.moved(of.law.scan_passes * 2.0 * 3 * inner * tokens), written=2.0 * inner * tokens, saved=2.0 * inner * tokens,
    )  # fmt: skip
    part.product(out, tokens, out.outputs, inner)
    part.reduce()
    _add(part, of)


# ---- ends


def _embedding(of: Numbers) -> Part:
    part = Building(of=of)
    part.parameters = of.shape.embedding_parameters / of.plan.tp
    part.passes("embedding", _hidden_shape(of), 2 * of.hidden_bytes, written=of.hidden_bytes)
    part.reduce()
    return part.done("embedding", of.hidden_bytes)


def _head(of: Numbers) -> Part:
    part = Building(of=of)
    (head,) = of.matrices("head")
    columns = -(-of.shape.vocab // of.plan.tp)
    logits = float(of.tokens) * columns
    _norm(part, of)
    part.reduced_backward()
    part.product(head, of.tokens, columns, head.inputs)
    moved = LOSS_BYTES[of.framework.loss] * logits
    part.passes(
        "loss", (of.plan.micro_batch, of.plan.sequence, columns), FORWARD_LOSS * moved, written=of.width * of.tokens,
        saved=KEPT_LOGIT_BYTES[of.framework.loss] * logits, backward=(1 - FORWARD_LOSS) * moved,
    )  # fmt: skip
    part.backward[-1] = [
        replace(op, written_bytes=LOGIT_GRADIENT_BYTES[of.framework.loss] * logits) for op in part.backward[-1]
    ]
    if of.plan.tp > 1:
        for _ in range(LOSS_REDUCTIONS):
            sums = communication("all_reduce", "tp", 4.0 * of.tokens, dtype="fp32")
            part.forward.add(sums, part.last())
    return part.done("head", of.hidden_bytes)
