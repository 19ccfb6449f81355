"""The public call: read the arguments, refuse what cannot be honoured, run the op."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dtensor_ring_swa.agreement import agree
from dtensor_ring_swa.autocast import cast_inputs
from dtensor_ring_swa.call_checks import Checked, CuSeqlens, check_call
from dtensor_ring_swa.checks import check_documents
from dtensor_ring_swa.dtensor import attention, viewed
from dtensor_ring_swa.facts import FACTS, facts_of
from dtensor_ring_swa.groups import group_of
from dtensor_ring_swa.library import out_of_graphs
from dtensor_ring_swa.option_checks import check_seq_len
from dtensor_ring_swa.options import read_options
from dtensor_ring_swa.window import WindowLike, sides_of


@overload
def ring_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, window: WindowLike = ..., scale: float | None = ...,
    softcap: float = ..., sinks: torch.Tensor | None = ..., sink_tokens: int = ..., cu_seqlens: CuSeqlens | None = ...,
    layout: str = ..., load_balance: str = ..., exchange: str = ..., kernel: str = ...,
    mesh: DeviceMesh | ProcessGroup | None = ..., deterministic: bool = ..., seq_len: int | None = ...,
    return_lse: Literal[False] = ...,
) -> torch.Tensor: ...  # fmt: skip
@overload
def ring_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, window: WindowLike = ..., scale: float | None = ...,
    softcap: float = ..., sinks: torch.Tensor | None = ..., sink_tokens: int = ..., cu_seqlens: CuSeqlens | None = ...,
    layout: str = ..., load_balance: str = ..., exchange: str = ..., kernel: str = ...,
    mesh: DeviceMesh | ProcessGroup | None = ..., deterministic: bool = ..., seq_len: int | None = ...,
    return_lse: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip
def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    window: WindowLike = (-1, 0),
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    sink_tokens: int = 0,
    cu_seqlens: CuSeqlens | None = None,
    layout: str = "contiguous",
    load_balance: str = "auto",
    exchange: str = "auto",
    kernel: str = "auto",
    mesh: DeviceMesh | ProcessGroup | None = None,
    deterministic: bool = False,
    seq_len: int | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention in which each query sees a window of neighbours, over a sharded sequence.

    The three ways to call it give the same numbers:

    * DTensors: the mesh axis that shards dim 1 is the context-parallel one. Other axes may shard the
      batch (``Shard(0)``) or the heads (``Shard(2)``; k and v too, or replicated), or replicate.
    * Plain tensors with ``mesh``: each rank passes its shard and gets its shard.
    * Plain tensors alone: the whole sequence on one device.

    With a halo (see ``exchange``) each rank receives only the keys that its window reaches beyond its
    shard, from at most ``ceil(left / chunk) + ceil(right / chunk)`` ranks.

    Args:
        q: Queries ``[B, S, Hq, D]``, or ``[T, Hq, D]`` with ``cu_seqlens`` (k, v and the results
            likewise); float64, float32, bfloat16 or float16. Under torch.autocast q, k and v are cast
            as for ``scaled_dot_product_attention``.
        k: Keys ``[B, S, Hkv, D]`` with ``Hq % Hkv == 0``.
        v: Values ``[B, S, Hkv, Dv]``.
        window: ``(left, right)`` tokens visible on each side of the query, its own not counted; -1 or
            None is unlimited. ``Window`` converts the conventions of other libraries.
        scale: Factor on the scores; ``D ** -0.5`` by default.
        softcap: Scores become ``softcap * tanh(scores / softcap)``; 0.0 is off.
        sinks: Learned sink logits ``[Hq]``, differentiable: a term ``exp(sink)`` in each softmax's
            denominator, not softcapped. With DTensors q, k and v it may be a DTensor, sharded with q's
            heads and replicated otherwise; its gradient comes back summed over the ranks. A plain
            tensor is this rank's own copy, and its gradient this rank's contribution.
        sink_tokens: The first tokens of the sequence (of each document) that its later tokens see
            besides their window (StreamingLLM). A limit on the right hides them too.
        cu_seqlens: Boundaries of documents packed into the sequence: global, from 0 to S; int32 or
            int64 ``[N + 1]``, or ``[B, N + 1]`` with a list for each batch row; or a ``Documents``
            built once a step, which saves a copy to the host a call. Nothing is seen across them.
        layout: How positions lie on the ranks: ``"contiguous"`` (``torch.chunk``'s shards, of any
            length), ``"striped"`` (token i on rank ``i % ranks``) or ``"zigzag"`` (of ``2 * ranks``
            slices, rank r holds r and ``2 * ranks - 1 - r``). Shards in, shards out. The window
            always counts positions in the sequence.
        load_balance: For contiguous shards. ``"auto"`` deals q, k and v to the zigzag layout and out
            back where the window is unlimited on one side and the length is a multiple of
            ``2 * ranks``, since the last rank has up to twice the mean work otherwise (packed
            documents only if that gains a tenth); ``"striped"`` and ``"zigzag"`` do so for any window;
            ``"none"`` never.
        exchange: ``"halo"`` (hold all keys that the window reaches, merge nothing), ``"ring"`` (shards
            pass by, two at a time) or ``"auto"``: the ring where a halo could hold more than two shards
            for a window without limit, eight for a limited one. ``make_plan(...).describe()`` says.
        kernel: ``"auto"``, the fastest that can serve the call, or a name: ``"flash"``, ``"aten"``,
            ``"triton"``, ``"reference"``.
        mesh: For plain shards: a 1-D DeviceMesh or a ProcessGroup. DTensors carry their own.
        deterministic: Bitwise the same gradients on every run; raises where the kernel cannot.
        seq_len: For plain shards: tokens of the whole sequence, when the caller knows it. By default
            the ranks compare notes first (one small message between hosts a call), which also
            catches ranks that call with different arguments. A graph of torch.compile is for equal
            shards, and compares their lengths alone.
        return_lse: Also return the log-sum-exp of the scores.

    Returns:
        out ``[B, S, Hq, Dv]`` in q's dtype, with q's placements. With ``return_lse`` also lse
        ``[B, Hq, S]``, natural log, float32 (float64 for float64 inputs), sharded like q on the dims
        it has, not differentiable; ``[Hq, T]`` for packed inputs. Learned sinks are part of it. A row
        that sees no key has out 0 and lse ``-inf``, or the sink.

    Raises:
        ValueError: If the arguments do not fit together, before anything is sent, on every rank.
        NotImplementedError: If the kernel cannot do it; the message says why and which can. Also for
            forward-mode derivatives.
    """
    packed = cu_seqlens is not None and all(isinstance(x, torch.Tensor) and x.ndim == 3 for x in (q, k, v))
    if packed:
        q, k, v = (viewed(x, lambda x: x.unsqueeze(0)) for x in (q, k, v))
    q, k, v = cast_inputs(q, k, v)
    group = None if mesh is None or isinstance(q, DTensor) else group_of(mesh)
    error: Exception | None = None
    options, checked = None, Checked(seq_len)
    try:
        left, right = sides_of(window)
        options = read_options(
            left, right, kernel, layout, load_balance, exchange, deterministic, sink_tokens, softcap, scale
        )  # fmt: skip
        check_seq_len(seq_len)
        checked = check_call(q, k, v, sinks, cu_seqlens, mesh, group, seq_len)
    except Exception as problem:  # of any kind: the peers of a rank that raised alone would wait for it
        if torch.compiler.is_compiling():
            # Shown first; the message of an exception comes last in Dynamo's report, after advice that misleads.
            torch._dynamo.graph_break(msg=str(problem))
        error = problem
        if packed:
            error.add_note("q, k and v of [T, H, D] are taken as [1, T, H, D]; dims are counted there")
    if group is not None and checked.seq_len is None and group.size() > 1:
        facts: tuple[int, ...] = ()
        if options is not None and error is None:
            asked = (scale, softcap, *options.names)
            facts = facts_of(q, k, v, sinks, checked.documents, options.window, sink_tokens, *asked)
        checked = checked._replace(seq_len=agree(group, FACTS, facts, error))
    if error is not None:
        raise error
    assert options is not None
    seq_len = q.shape[1] if checked.seq_len is None else checked.seq_len
    if checked.documents is not None:
        check_documents(checked.documents, q.shape[0], seq_len)

    scale = q.shape[-1] ** -0.5 if scale is None else scale
    tracing = torch.compiler.is_compiling()
    # Other tracers make lengths symbolic, too: such a graph is for all lengths.
    in_graph = tracing or isinstance(seq_len, torch.SymInt)
    text = options.names._replace(assumed=checked.assumed, in_graph=True).text if in_graph else options.text
    # Named one by one: Dynamo of torch 2.11 cannot unpack a window.
    tokens = [options.window.left, options.window.right, sink_tokens, seq_len]
    run = attention if tracing else out_of_graphs(attention)
    out, lse, _ = run(q, k, v, sinks, checked.boundaries, tokens, [scale, softcap], text, checked.place)
    if packed:
        out, lse = viewed(out, lambda x: x.squeeze(0)), viewed(lse, lambda x: x.squeeze(0))
    return (out, lse) if return_lse else out
