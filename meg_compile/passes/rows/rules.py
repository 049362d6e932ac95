"""What operators do with the rows of a batch, entry by entry, along dims, in sums of products and in losses."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from meg_compile.passes.rows.call import Call, joined, pointwise, right_aligned, rule, tensors
from meg_compile.passes.rows.state import Const, Couples, Part, Rows, Sorted, State, Total, Unclear

Labels = list[tuple[fx.Node, list[Any]]]


def total(call: Call, kind: str) -> Total:
    return Total(frozenset({Part(call.node, kind)}))


@rule(*"to _to_copy contiguous clone detach alias lift_fresh lift_fresh_copy type_as float half double dropout".split())
@rule(*"feature_dropout alpha_dropout __and__ __or__ __xor__ where masked_fill prelu log_sigmoid hardswish".split())
@rule(*"floor_divide rsub polar complex zeros_like ones_like full_like empty_like rand_like randn_like".split())
@rule(*"bernoulli fill expand_as add mul sub div true_divide isinf isfinite".split())
@rule(*"real imag angle conj _conj conj_physical resolve_conj".split())
def entry_by_entry(call: Call) -> State:
    return pointwise(call, call.node.all_input_nodes, len(call.shape))


@rule(*"new_zeros new_ones new_full new_empty".split())
def filled(call: Call) -> State:
    return Const(frozenset(range(len(call.shape))))


@rule("linear")
def linear(call: Call) -> State:
    lead = [("lead", i) for i in range(len(call.shape) - 1)]
    found = contract(call, [(call["input"], [*lead, "i"]), (call["weight"], ["o", "i"])], [*lead, "o"])
    return with_bias(call, found, call["bias"])


@rule("addmm", "baddbmm")
def addmm(call: Call) -> State:
    first, second = ("mat1", "mat2") if call.name == "addmm" else ("batch1", "batch2")
    lead = ["b"] if call.name == "baddbmm" else []
    operands = [(call[first], [*lead, "m", "k"]), (call[second], [*lead, "k", "n"])]
    return with_bias(call, contract(call, operands, [*lead, "m", "n"]), call["self"])


@rule("mm", "bmm", "mv", "dot", "matmul", "vdot")
def matmul(call: Call) -> State:
    left, right = call.node.args[:2]
    assert isinstance(left, fx.Node) and isinstance(right, fx.Node)
    n, m = len(call.shape_of(left)), len(call.shape_of(right))
    x = ["k"] if n == 1 else [*right_aligned(n - 2), "m", "k"]
    y = ["k"] if m == 1 else [*right_aligned(m - 2), "k", "n"]
    lead = right_aligned(max(n, m, 2) - 2)
    return contract(call, [(left, x), (right, y)], [*lead, *(["m"] if n > 1 else []), *(["n"] if m > 1 else [])])


@rule("einsum")
def einsum(call: Call) -> State:
    inputs, arrow, output = call["equation"].replace(" ", "").partition("->")
    if not arrow:
        raise Unclear("its equation says no result")
    operands: Labels = []
    dots = 0
    for node, text in zip(call["tensors"], inputs.split(","), strict=True):
        before, _, after = text.partition("...")
        between = len(call.shape_of(node)) - len(before) - len(after)
        dots = max(dots, between)
        operands.append((node, [*before, *right_aligned(between), *after]))
    before, ellipsis, after = output.partition("...")
    return contract(call, operands, [*before, *(right_aligned(dots) if ellipsis else []), *after])


def contract(call: Call, operands: Labels, out: list[Any]) -> State:
    """A sum of products over the labels that `out` lacks."""
    found = joined(call, operands, out, "it multiplies rows with other rows")
    assert found is not None
    return total(call, "sum") if found.dims == {-1} else found


def with_bias(call: Call, found: State, bias: fx.Node | None) -> State:
    if bias is None:
        return found
    if not isinstance(call.state(bias), Const) or isinstance(found, Total):
        raise Unclear("its bias is not a parameter of every row")
    return found


@rule("scaled_dot_product_attention")
def attention(call: Call) -> State:
    lead = right_aligned(len(call.shape) - 2)
    operands: Labels = [
        (call[name], [*right_aligned(len(call.shape_of(call[name])) - 2), *last])
        for name, last in (("query", "td"), ("key", "sd"), ("value", "se"))
    ]
    if call["attn_mask"] is not None:
        n = len(call.shape_of(call["attn_mask"]))
        operands.append((call["attn_mask"], [*right_aligned(n - 2), "t", "s"][-n:]))
    found = joined(call, operands, [*lead, "t", "e"], "its queries see the keys of other rows")
    if found is None or found.dims & {-1, len(lead), len(lead) + 1}:
        raise Couples("its queries see the keys of other rows")
    return found


@rule("cdist", "_cdist_forward")
def cdist(call: Call) -> State:
    n, m = (len(call.shape_of(call[x])) - 2 for x in ("x1", "x2"))
    operands: Labels = [(call["x1"], [*right_aligned(n), "p", "k"]), (call["x2"], [*right_aligned(m), "r", "k"])]
    found = joined(call, operands, [*right_aligned(max(n, m)), "p", "r"], "it compares rows with each other")
    if found is None or -1 in found.dims:
        raise Couples("it compares rows with each other")
    return found


@rule("sum", "mean")
def reduction(call: Call) -> State:
    rows, shape = call.rows()
    gone = _dims(call["dim"], len(shape))
    if rows.dims <= gone:
        return total(call, call.name)
    return _without(call, rows, shape, gone)


@rule(*"softmax _softmax log_softmax _log_softmax cumsum cumprod cummax cummin logcumsumexp flip roll sort".split())
@rule(*"argsort topk logsumexp argmax argmin amax amin aminmax max min var std var_mean std_mean prod any all".split())
@rule(*"norm linalg_vector_norm median nanmedian mode kthvalue nanmean nansum count_nonzero glu unfold".split())
def along(call: Call) -> Any:
    """Runs along some dims, which may go."""
    rows, shape = call.rows("input" if "input" in call.arguments else "self")
    if call.name == "sort" and len(shape) == 1:
        return [Sorted(call.node, rows, "keys"), Sorted(call.node, rows, "order")]
    dim = next((call[name] for name in ("dim", "dims", "dimension") if name in call.arguments), None)
    return _without(call, rows, shape, _dims(dim, len(shape)))


def _without(call: Call, rows: Rows, shape: list[int], gone: set[int]) -> Any:
    if rows.dims & gone:
        raise Couples("it runs over the rows")
    kept = [d for d in range(len(shape)) if d not in gone]

    def one(val: torch.Tensor) -> Rows:
        stays = val.dim() >= len(shape)
        return rows.moved({d: d if stays else kept.index(d) for d in kept})

    return [one(v) for v in call.val] if isinstance(call.val, (list, tuple)) else one(call.val)


def _dims(dim: Any, ndim: int) -> set[int]:
    chosen = [dim] if isinstance(dim, int) else list(dim or range(ndim))
    return {d % ndim for d in chosen if ndim}


@rule("layer_norm", "rms_norm", "native_layer_norm")
def norm(call: Call) -> State:
    rows, shape = call.rows("input")
    if any(d >= len(shape) - len(call["normalized_shape"]) for d in rows.dims):
        raise Couples("it normalises over the rows")
    return rows


@rule(*"batch_norm native_batch_norm cudnn_batch_norm _native_batch_norm_legit".split())
def batch_norm(call: Call) -> State:
    if call["training"] is False:
        return leading(call)
    raise Couples("it normalises over the rows of a batch")


@rule(*"conv1d conv2d conv3d convolution conv_transpose1d conv_transpose2d conv_transpose3d group_norm".split())
@rule(*"instance_norm max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d pixel_shuffle".split())
@rule(*"adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool2d channel_shuffle".split())
@rule(*"upsample_nearest1d upsample_nearest2d upsample_bilinear2d upsample_bicubic2d upsample_linear1d im2col".split())
def leading(call: Call) -> State:
    """Takes one row after the other where they are the first of three dims or more."""
    rows, shape = call.rows("input" if "input" in call.arguments else "self")
    if rows.dims != {0} or len(shape) < 3 or isinstance(call.val, (list, tuple)):
        raise Unclear("its rows are not the first dim")
    return rows


@rule("embedding")
def embedding(call: Call) -> State:
    if call["scale_grad_by_freq"]:
        raise Couples("it scales gradients by how often a batch holds an index")
    rows, _ = call.rows("indices")
    return rows


@rule(*"mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits".split())
@rule(*"kl_div soft_margin_loss poisson_nll_loss".split())
def loss(call: Call) -> State:
    nodes = call.node.all_input_nodes
    ndim = max(len(call.shape_of(n)) for n in nodes)
    found = pointwise(call, nodes, ndim)
    return [found, total(call, "mean"), total(call, "sum")][call["reduction"]]


@rule("cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d")
def cross_entropy(call: Call) -> State:
    """A mean over class indices is one over those that count. Over class probabilities it is one over all."""
    x, target = call["self"], call["target"]
    n = len(call.shape_of(x))
    labels: list[Any] = ["c"] if n == 1 else ["n", "c", *range(n - 2)]
    out = [label for label in labels if label != "c"]
    likely = target.meta["val"].is_floating_point()
    found = joined(call, [(x, labels), (target, labels if likely else out)], out, "it pairs rows with other rows")
    if found is None or -1 in found.dims:
        raise Couples("its classes are rows of the batch")
    if call["reduction"] == 0:
        return found
    if call["reduction"] == 2:
        return total(call, "sum")
    if call["weight"] is not None and not likely:
        raise Couples("it divides by the weights of the classes that a batch holds")
    return total(call, "mean" if likely or isinstance(call.state(target), Const) else "counted")


@rule("scatter", "scatter_add", "scatter_reduce", "gather", "take_along_dim")
def scatter(call: Call) -> State:
    """Every entry moves along one dim only."""
    nodes = tensors(list(call.arguments.values()))
    found = pointwise(call, nodes, len(call.shape))
    if call["dim"] is None or call["dim"] % len(call.shape) in found.dims:
        raise Couples("it moves entries from row to row")
    sizes = {tuple(call.shape_of(n)[d] for d in sorted(found.dims)) for n in nodes}
    if len(sizes) > 1:
        raise Couples("it picks some of the rows")
    return found


@rule("copy")
def copy(call: Call) -> State:
    """All of a value is written over."""
    return pointwise(call, [call["src"]], len(call.shape))


@rule("slice_scatter", "select_scatter")
def written(call: Call) -> State:
    """Some entries along a dim are another tensor's."""
    target, source, dims = call["self"], call["src"], list(range(len(call.shape)))
    at = (call["dim"] or 0) % len(dims)
    labels = dims if call.name == "slice_scatter" else dims[:at] + dims[at + 1 :]
    found = joined(call, [(target, dims), (source, labels)], dims, "it brings different rows together")
    if found is None or at in found.dims:
        raise Couples("it writes over some of the rows")
    return found


@rule("broadcast_tensors")
def broadcast_tensors(call: Call) -> list[State]:
    ndim = call.val[0].dim()
    lead = {n: ndim - len(call.shape_of(n)) for n in call["tensors"]}
    return [_shifted(call.state(n), lead[n]) for n in call["tensors"]]


def _shifted(state: State, lead: int) -> State:
    if isinstance(state, Rows):
        return Rows(tuple(p._replace(dim=p.dim + lead) for p in state.pieces))
    raise Unclear("it stretches what are no rows")


@rule("one_hot")
def one_hot(call: Call) -> State:
    rows, _ = call.rows()
    return rows
