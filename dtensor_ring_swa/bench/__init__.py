"""The benchmark: ``python -m dtensor_ring_swa.bench``, alone or under torchrun.

It times ``ring_attention`` beside what else computes the same numbers (``allgather.py``, ``merge_ring.py``,
``torch_ring.py``, ``external.py``) in one interleaved run, counts bytes, and predicts scaling without any rank
(``simulate.py``). The files in reading order: shapes, extras, parser, refusals, options, job, case, inputs, methods,
laps, traffic, ours, ideal, allgather, merge_ring, torch_ring, external, contest, timing, wire, check, run, record,
report, files, hybrid, cli; rates, predict_ring, predict, simulate.

**The ideal.** For a limited window: one kernel call on the rank's own (query, key) pairs, its halo in place. For a
window that is unlimited on a side, and for packed documents and sinks: one device's time for the whole sequence,
divided by the ranks.

**The JSON of a measured run** (``--json``): ``versions``, ``device``, ``ranks``, ``repeats``, ``batch``, ``extras``
(``lengths``, ``sinks``, ``sink_tokens``), ``cases`` and ``hybrids``. A case has ``shape``, ``dtype``, ``kernel``,
``rows`` a rank, ``seq_len``, ``input_sets``, ``forward_flops_a_rank`` (of the busiest rank; of the mean rank where the
ideal is a share of one device's time), ``failures`` of ``--check``, and ``methods``. A method has ``name`` and

* ``skipped``: why it did not run, and nothing else; or
* ``backward_skipped``: why it has no backward; ``note``: what it is made of; ``peak_bytes``: memory of one forward
  and backward; ``errors``: relative ones of out, dq, dk, dv and dsinks, with ``--check``; ``imbalance_predicted``:
  pairs of the busiest rank over the mean, from the geometry; and
* ``forward`` and ``backward``, each with ``ms`` (median, of the slowest rank), ``iqr_ms``, ``host_ms``, ``tflops``,
  ``ratio_to_ideal``, ``received_predicted`` and ``received_counted`` bytes, ``bytes_as_predicted``,
  ``imbalance_measured`` (time of the slowest rank over the mean) and, of the ideal, ``one_device_ms``.

``imbalance_*`` and ``one_device_ms`` are there where the ideal is a share of one device's time, but with extras nothing
is predicted of the imbalance. A hybrid has ``name``, ``layers`` by shape, and ``methods`` with ``ms`` and
``ratio_to_ideal`` of all layers. What is not known is null.

**The JSON of a simulation**: ``simulated``, ``versions``, ``link_gb_s``, ``batch``, ``dtype``, ``rates`` (all there
are), ``seconds`` and ``cases``, each with ``shape``, ``load_balance``, ``rates_used`` (in words, as printed) and
``predictions`` (see ``predict.Prediction``).
"""
